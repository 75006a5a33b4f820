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
    """Return a recipe as a `run.Partial`, which can be changed and passed to NeMo-Run.

    Args:
        name: recipe name, from `recipes list`.
        num_nodes: number of nodes; None = the smallest that the recipe declares. For other sizes, a layout is planned.
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
    """Build the `run.Partial` of a recipe that sized.py has adapted to a size. Raises UserError like `build`."""
    from superpod.errors import UserError

    try:
        _prevent_compilation_without_gpu()
        from superpod.collection import ranks
        from superpod.collection.facts import environment
        from superpod.nemo2 import options as variants
        from superpod.nemo2.build import partial
    except ModuleNotFoundError as missing:
        raise UserError(
            f"building a recipe needs NeMo, and {missing.name} is not installed",
            "run `pip install -c constraints.txt -e '.[nemo]'`; `recipes doctor` lists the installed packages",
        ) from missing
    ranks.refuse_experiments()
    environment.refuse_in_configuration(options)
    partial = partial.build(recipe, num_nodes)
    _require_importable_classes(partial)
    variants.apply(partial, options)
    return partial


def _require_importable_classes(partial: run.Partial) -> None:
    """Raise UserError if the class of the model is defined in a collection's models/, which ranks cannot import.

    Files in models/ import this package, which is not installed for the ranks.
    """
    import fiddle as fdl

    from superpod.collection.user_models import PREFIX
    from superpod.errors import UserError

    for node in (partial.model, partial.model.config):
        cls = fdl.get_callable(node)
        if cls.__module__.startswith(PREFIX):
            raise UserError(
                f"ranks cannot import {cls.__qualname__}, which is defined in a file of models/",
                "define it in the collection's modules/ or in an installed package, and import it from there",
            )


def _prevent_compilation_without_gpu() -> None:
    """Prevent Megatron from compiling a CUDA helper when it is imported (megatron.core.inference.unified_memory).

    With a CUDA build of torch and nvcc but no GPU, for example on a login node, torch raises an IndexError there, which
    Megatron does not catch. It does catch the OSError for a build folder that cannot be created. Ranks inherit the
    variable.
    """
    import os

    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.devnull)
