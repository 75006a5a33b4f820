"""Training recipes: one `run.Partial` per model, task, GPU and precision. The only importer of NeMo.

>>> from superpod.recipes import build
>>> recipe = build("llama3_8b_pretrain_h100_bf16", num_nodes=4)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import nemo_run as run

    from superpod.collection.registry import Recipe


__path__: list[str] = []  # modules that were in this package are found by their old names: superpod/old_names.py


def build(
    name: str,
    num_nodes: int | None = None,
    options: str = "",
    *,
    seq: int | None = None,
    gbs: int | None = None,
    batch_tokens: int | None = None,
) -> run.Partial:
    """The recipe `name` as a `run.Partial`, to be changed like any other and given to NeMo-Run.

    Args:
        name: as `recipes list` shows it.
        num_nodes: None = the recipe's smallest size; one that it does not declare is planned on the spot.
        options: variants, comma-separated: `superpod.nemo2.options.OPTIONS`.
        seq: tokens of a sample; None = the recipe's.
        gbs: samples of a global batch; None = the recipe's.
        batch_tokens: tokens of a global batch, in place of `gbs`.

    Raises:
        UserError: when there is no such recipe or option, no layout fits the size, or NeMo is not installed.
    """
    from superpod.collection.sizes import sized

    return build_sized(sized.of_name(name, sized.Size(num_nodes, seq, gbs, batch_tokens)), num_nodes, options)


def build_sized(recipe: Recipe, num_nodes: int | None = None, options: str = "") -> run.Partial:
    """`build` of a recipe that is sized already (`sized.py`), at its smallest size or another. Raises as `build`."""
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

    from superpod.collection.own_models import PREFIX
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
