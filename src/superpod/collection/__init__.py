"""The collection of recipes: models, sizes and layouts, and facts about each recipe. No module here imports NeMo."""

from superpod.common.collection import add

__all__ = ["add"]
