"""Facts and arithmetic of models, hardware, layouts, memory and time. Imports neither torch nor NeMo."""
