"""Training recipes: one `run.Partial` per model, task, GPU and precision. The only importer of NeMo.

>>> from superpod.recipes import build
>>> recipe = build("llama3_8b_pretrain_h100_bf16", num_nodes=4)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import nemo_run as run


def build(name: str, num_nodes: int | None = None, options: str = "") -> run.Partial:
    """The recipe `name` as a `run.Partial`, to be changed like any other and given to NeMo-Run.

    Args:
        name: as `recipes list` shows it.
        num_nodes: one of the recipe's sizes; None = the smallest.
        options: variants, comma-separated: `superpod.recipes.options.OPTIONS`.

    Raises:
        UserError: when there is no such recipe or option, it is not laid out for `num_nodes`, or NeMo is not installed.
    """
    from superpod.errors import UserError
    from superpod.recipes.registry import find

    recipe = find(name)
    recipe.layout(num_nodes)
    try:
        _no_compiler_without_gpu()
        from superpod.recipes import options as variants
        from superpod.recipes import partial
    except ModuleNotFoundError as missing:
        raise UserError(
            f"building a recipe needs NeMo, and {missing.name} is not installed",
            "pip install -c constraints.txt -e '.[nemo]'; `recipes doctor` shows what is there",
        ) from missing
    partial = partial.build(recipe, num_nodes)
    _importable_by_ranks(partial)
    variants.apply(partial, options)
    return partial


def _importable_by_ranks(partial: run.Partial) -> None:
    """Refuse a class that a collection defines beside its models: those files import this package, which ranks lack."""
    import fiddle as fdl

    from superpod.errors import UserError
    from superpod.recipes.own_models import PREFIX

    for node in (partial.model, partial.model.config):
        made = fdl.get_callable(node)
        if made.__module__.startswith(PREFIX):
            raise UserError(
                f"ranks cannot import {made.__qualname__}, which is defined in a file of models/",
                "define it in the collection's modules/ or in an installed package, and import it from there",
            )


def _no_compiler_without_gpu() -> None:
    """Keep Megatron from compiling a CUDA helper while it is imported (megatron.core.inference.unified_memory).

    With a CUDA build of torch and nvcc, but no GPU, as on a login node, torch dies there of an IndexError that Megatron
    does not expect. A build folder that cannot be made is an OSError, which it does. Ranks inherit the variable.
    """
    import os

    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.devnull)
