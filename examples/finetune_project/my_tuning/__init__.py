"""Fine-tuning of a model on the samples of this project."""
