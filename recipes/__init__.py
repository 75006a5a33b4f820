"""Training recipes: one `run.Partial` per model, task, GPU and precision. The only importer of NeMo.

>>> from superpod.recipes import build
>>> recipe = build("llama3_8b_pretrain_h100_bf16", num_nodes=4)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import nemo_run as run


def build(name: str, num_nodes: int | None = None) -> run.Partial:
    """The recipe `name` as a `run.Partial`, to be changed like any other and given to NeMo-Run.

    Raises:
        UserError: when there is no such recipe, it is not laid out for `num_nodes`, or NeMo is not installed.
    """
    from superpod.planner.errors import UserError
    from superpod.recipes.registry import find

    recipe = find(name)
    recipe.layout(num_nodes)
    try:
        from superpod.recipes import base
    except ModuleNotFoundError as missing:
        raise UserError(
            f"building a recipe needs NeMo, and {missing.name} is not installed",
            "pip install -c constraints.txt -e '.[nemo]'; `recipes doctor` shows what is there",
        ) from missing
    return base.pretrain(recipe, num_nodes)
