"""Facts and arithmetic: models, hardware, layouts, memory, time. Imports neither torch nor NeMo."""
