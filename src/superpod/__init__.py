"""superpod-recipes: plan, check, rehearse and run training recipes for NeMo 2.0 and Megatron-Core."""

from superpod import old_names

old_names.install()
