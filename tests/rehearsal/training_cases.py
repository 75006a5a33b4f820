"""Cases that train. The dense ones resume from the reference's checkpoint in other layouts: the same losses follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_recipe import tiny, train


def reference(folder: Path, without: frozenset[str], **changes: Any) -> dict[str, Any]:
    """Four steps on one rank, with a checkpoint after the second: what the others resume from."""
    recipe = tiny(folder, steps=4, **changes)
    recipe.log.ckpt.every_n_train_steps, recipe.log.ckpt.save_top_k = 2, -1
    return train(folder, recipe, without)


def resumed(
    folder: Path, without: frozenset[str], source: str = "reference", save_every: int = 100, **changes: Any
) -> dict[str, Any]:
    """Steps three and four, from the reference's checkpoint, in another layout."""
    recipe = tiny(folder, steps=4, **changes)
    recipe.log.ckpt.every_n_train_steps = save_every
    recipe.resume.resume_from_path = str(folder.parent / source / "run/checkpoints/step=1")
    return train(folder, recipe, without)


def sharded(folder: Path, without: frozenset[str]) -> dict[str, Any]:
    """Four steps of Megatron-FSDP from the weights that the reference draws too."""
    from superpod.nemo2.build.layout import set_sharding

    recipe = tiny(folder, steps=4)
    set_sharding(recipe, "zero3")
    return train(folder, recipe, without)


def with_option(folder: Path, without: frozenset[str], option: str) -> dict[str, Any]:
    """Four steps in bf16 with an option, from the weights that the reference draws too."""
    from superpod.nemo2 import options

    recipe = tiny(folder, steps=4, precision="bf16")
    options.apply(recipe, option)
    return train(folder, recipe, without)


def restored(folder: Path, without: frozenset[str], **changes: Any) -> dict[str, Any]:
    """Two new steps from a reference's weights; Megatron can't resume the optimizer under another EP."""
    import nemo_run as run
    from nemo.lightning import AutoResume
    from nemo.lightning.pytorch.strategies.utils import RestoreConfig

    recipe = tiny(folder, steps=2, experts=4, **changes)
    checkpoint = folder.parent / "moe-reference/run/checkpoints/step=1"
    recipe.resume = run.Config(AutoResume, restore_config=run.Config(RestoreConfig, path=str(checkpoint)))
    return train(folder, recipe, without)


def finetuned(
    folder: Path,
    without: frozenset[str],
    peft: str = "",
    source: str = "reference",
    alike: bool = False,
    **changes: Any,
) -> dict[str, Any]:
    """llm.finetune from a reference's weights, or of adapters beside them, which may start as in other layouts."""
    import fiddle as fdl
    import nemo_run as run
    from nemo.collections import llm
    from nemo.lightning import AutoResume
    from nemo.lightning.pytorch.strategies.utils import RestoreConfig

    from superpod.rehearsal.patches.adapters import initialize_independently_of_layout

    recipe = tiny(folder, **{"steps": 2, **changes})
    fdl.update_callable(recipe, llm.finetune)
    recipe.tokenizer = "data"
    if peft:
        recipe.peft = run.Config(getattr(llm.peft, peft), dim=4)
    initialize_independently_of_layout()
    checkpoint = folder.parent / source / "run/checkpoints/step=1"
    recipe.resume = run.Config(AutoResume, restore_config=run.Config(RestoreConfig, path=str(checkpoint)))
    return train(folder, recipe, without)
