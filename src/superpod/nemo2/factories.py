"""Register every recipe as a NeMo-Run factory of its task: `nemo llm pretrain --factory NAME`.

NeMo-Run imports this module through the `nemo_run.cli` entry point, and parses `--factory "NAME(num_nodes=4)"` by the
annotations. These must be types, not strings, so this module has no `from __future__ import annotations`.
"""

from collections.abc import Callable

import nemo_run as run
from nemo.collections import llm

from superpod.collection.registry import Recipe, recipes
from superpod.recipes import build


def _make_factory(recipe: Recipe) -> Callable[..., run.Partial]:
    """Return a function that builds `recipe` with a number of nodes, options, sequence length and global batch size."""
    default_gbs = recipe.layout().gbs

    def make(
        num_nodes: int = recipe.nodes[0], options: str = "", seq: int = recipe.seq, gbs: int = default_gbs
    ) -> run.Partial:
        # None stands for the value of the recipe, for which a declared layout is used unchanged.
        sizes = {"seq": None if seq == recipe.seq else seq, "gbs": None if gbs == default_gbs else gbs}
        return build(recipe.name, num_nodes, options, **sizes)

    make.__name__ = make.__qualname__ = recipe.name
    make.__doc__ = f"{recipe.model.title}: {recipe.task} on {recipe.gpu} in {recipe.precision}."
    return make


for _recipe in recipes().values():
    _target = llm.pretrain if _recipe.task == "pretrain" else llm.finetune
    run.cli.factory(_make_factory(_recipe), target=_target, name=_recipe.name)
