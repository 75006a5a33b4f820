"""The web page of `recipes ui`: an interactive planner and live runs, served only on this machine."""
