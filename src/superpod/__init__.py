"""superpod-recipes: NeMo 2.0 / Megatron-Core recipes, planned, checked, rehearsed and launched.

The folders ``planner``, ``recipes``, ``launchers`` and ``slurm`` at the top of the repository are linked
here, so that they are imported as ``superpod.planner`` and so on: the bare names ``recipes`` and
``launchers`` belong to whoever else has them (see docs/decisions/0001-import-names.md).
"""
