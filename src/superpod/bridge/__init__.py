"""Recipes on Megatron-Bridge, NVIDIA's successor of NeMo 2.0 for LLM training.

`translate.py` converts a built NeMo recipe to the sections of Megatron-Bridge's `ConfigContainer`, `recipe_source.py`
and `launch_script.py` write them as files. None of them imports Megatron-Bridge: `stack.json` has the names of its
fields, architectures and recipes, written by scripts/bridge_facts.py in an environment with Megatron-Bridge.
"""
