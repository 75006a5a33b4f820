"""superpod-recipes: NeMo 2.0 / Megatron-Core recipes, planned, checked, rehearsed and launched."""

from superpod import old_names

old_names.install()
