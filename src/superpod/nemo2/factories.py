"""Every registered recipe as a NeMo-Run factory of its task: `nemo llm pretrain --factory NAME`.

Annotations here are real types, not strings: NeMo-Run parses `--factory "NAME(num_nodes=4)"` by them.
NeMo-Run imports this through the `nemo_run.cli` entry point; nothing else does.
"""

from collections.abc import Callable

import nemo_run as run
from nemo.collections import llm

from superpod.collection.registry import Recipe, recipes
from superpod.recipes import build


def _factory(recipe: Recipe) -> Callable[..., run.Partial]:
    own_gbs = recipe.layout().gbs

    def make(
        num_nodes: int = recipe.nodes[0], options: str = "", seq: int = recipe.seq, gbs: int = own_gbs
    ) -> run.Partial:
        changed = {"seq": None if seq == recipe.seq else seq, "gbs": None if gbs == own_gbs else gbs}
        return build(recipe.name, num_nodes, options, **changed)

    make.__name__ = make.__qualname__ = recipe.name
    make.__doc__ = f"{recipe.model.title}: {recipe.task} on {recipe.gpu} in {recipe.precision}."
    return make


for _recipe in recipes().values():
    _target = llm.pretrain if _recipe.task == "pretrain" else llm.finetune
    run.cli.factory(_factory(_recipe), target=_target, name=_recipe.name)
