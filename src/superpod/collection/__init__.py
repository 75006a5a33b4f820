"""The recipes: which exist, at which sizes, in which layouts, and what is known of each. No module here needs NeMo."""

from superpod.common.collection import add

__all__ = ["add"]
