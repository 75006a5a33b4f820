"""Everything between a recipe and a finished run: local runs, fine-tuning, conversion, and checks of this machine."""
