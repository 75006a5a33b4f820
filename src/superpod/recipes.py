"""Python API for training recipes: one `run.Partial` per model, task, GPU type and precision.

>>> from superpod.recipes import build
>>> recipe = build("llama3_8b_pretrain_h100_bf16", num_nodes=4)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import nemo_run as run

    from superpod.collection.registry import Recipe


__path__: list[str] = []  # lets superpod/old_names.py resolve modules that used to be in this package


def build(
    name: str,
    num_nodes: int | None = None,
    options: str = "",
    *,
    seq: int | None = None,
    gbs: int | None = None,
    batch_tokens: int | None = None,
) -> run.Partial:
    """Return a recipe as a `run.Partial`, which can be changed and passed to NeMo-Run like any other.

    Args:
        name: recipe name, from `recipes list`.
        num_nodes: number of nodes; None = the smallest that the recipe declares. For others, a layout is planned now.
        options: comma-separated options, from `superpod.nemo2.options.OPTIONS`.
        seq: sequence length in tokens; None = the recipe's.
        gbs: global batch size in samples; None = the recipe's.
        batch_tokens: global batch size in tokens, instead of `gbs`.

    Raises:
        UserError: the recipe or option does not exist, no layout fits the size, or NeMo is not installed.
    """
    from superpod.collection.sizes import sized

    return build_sized(sized.find_sized(name, sized.Size(num_nodes, seq, gbs, batch_tokens)), num_nodes, options)


def build_sized(recipe: Recipe, num_nodes: int | None = None, options: str = "") -> run.Partial:
    """Build a recipe that `sized.py` has already adapted to a size and batch. Raises UserError like `build`."""
    from superpod.errors import UserError

    try:
        _no_compiler_without_gpu()
        from superpod.collection import ranks
        from superpod.collection.facts import environment
        from superpod.nemo2 import options as variants
        from superpod.nemo2.build import partial
    except ModuleNotFoundError as missing:
        raise UserError(
            f"building a recipe needs NeMo, and {missing.name} is not installed",
            "pip install -c constraints.txt -e '.[nemo]'; `recipes doctor` shows what is there",
        ) from missing
    ranks.refuse_experiments()
    environment.refuse_in_configuration(options)
    partial = partial.build(recipe, num_nodes)
    _importable_by_ranks(partial)
    variants.apply(partial, options)
    return partial


def _importable_by_ranks(partial: run.Partial) -> None:
    """Refuse a class that a collection defines beside its models: those files import this package, which ranks lack."""
    import fiddle as fdl

    from superpod.collection.user_models import PREFIX
    from superpod.errors import UserError

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
