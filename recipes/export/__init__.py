"""Recipes as files of their own, and two recipes side by side."""
