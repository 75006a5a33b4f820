"""Recipes as Python files of their own (`recipes export`), and the differences of two recipes (`recipes diff`)."""
