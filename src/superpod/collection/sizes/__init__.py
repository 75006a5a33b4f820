"""Adapt recipes to sizes, sequence lengths, batch sizes and layouts that they do not declare."""
