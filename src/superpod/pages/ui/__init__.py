"""The web page of `recipes ui`, an interactive planner and live runs, served on this machine only."""
