"""The page of `recipes ui`: a planner with controls, and runs as they go, served to this machine alone."""
