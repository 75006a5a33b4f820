"""Export a built recipe to Megatron-Bridge: a Python file, a batch script, and a command for its own launcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from superpod.bridge import facts, launch_script, recipe_source, translate
from superpod.bridge.translate import BridgeConfig

if TYPE_CHECKING:
    import nemo_run as run

    from superpod.collection.registry import Recipe


@dataclass(frozen=True)
class BridgeExport:
    """The files of an exported recipe."""

    file: str
    """Text of the Python file."""
    script: str
    """Text of the batch script."""
    notes: list[str]
    """What to do before the run, and how to start it in another way."""


def export(
    partial: run.Partial, recipe: Recipe, *, environment: Mapping[str, str], command: str, file: str
) -> BridgeExport:
    """Export a built recipe.

    Args:
        partial: its NeMo configuration, with data, size and overrides applied.
        recipe: the recipe.
        environment: environment variables of the ranks.
        command: the command that exports it, for the heading of the file.
        file: name of the Python file.

    Raises:
        UserError: Megatron-Bridge cannot build the model.
    """
    from superpod.nemo2.export.heading import TASK_TITLES

    config = translate.translate(partial, recipe.name, recipe.model.hf, recipe.model.make())
    about = (
        f"{recipe.model.title}. {TASK_TITLES[recipe.task]} in {recipe.precision} on {config.world_size} {recipe.gpu} "
        "GPUs. "
        f"Written for Megatron-Bridge {facts.version()} by the command below. It does not need superpod-recipes; "
        "edit it freely."
    )
    script = file.removesuffix(".py") + ".sbatch"
    return BridgeExport(
        file=recipe_source.render(config, recipe.name, about, command, file, environment),
        script=launch_script.batch_script(config, file, script),
        notes=_notes(config, recipe),
    )


def _notes(config: BridgeConfig, recipe: Recipe) -> list[str]:
    notes = [f"not translated: {line}" for line in config.not_translated]
    if "pretrained_checkpoint" in config.sections["checkpoint"]:
        folder = translate.pretrained_folder(config.hf_model)
        convert = f'from megatron.bridge import AutoBridge; AutoBridge.import_ckpt("{config.hf_model}", "{folder}")'
        notes.append(f"convert the weights first: python -c '{convert}'")
    command = launch_script.run_recipe_command(config, recipe.model.name, recipe.gpu, recipe.precision)
    if command and recipe.task == "pretrain":
        notes.append(f"or apply the layout to Megatron-Bridge's own recipe, in a clone of its repository:\n  {command}")
    return notes
