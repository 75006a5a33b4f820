"""The collection of recipes: their models, sizes and layouts, and facts about each. No module here imports NeMo."""

from superpod.common.collection import add

__all__ = ["add"]
