"""The planner: models, hardware, layouts, memory and step time. Imports neither torch nor NeMo."""
