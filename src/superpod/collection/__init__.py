"""The recipes: their models, sizes and layouts, and facts about them. No module here imports NeMo."""

from superpod.common.collection import add

__all__ = ["add"]
