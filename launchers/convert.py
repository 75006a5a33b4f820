"""Conversions, each for a process of its own (see `apart`): what to call is planned here, without NeMo."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from superpod.errors import UserError


@dataclass(frozen=True)
class Conversion:
    """A function to call apart, and what it does in words."""

    title: str
    function: str
    arguments: dict[str, Any]


def plan(source: Path, out: Path, like: Path | None = None, dtype: str = "") -> Conversion:
    """To NeMo from a Hugging Face folder, to Hugging Face from a NeMo checkpoint or the best one of a run.

    Raises:
        UserError: `source` is neither, is not whole, or `out` is there.
    """
    from superpod.launchers import finetune
    from superpod.lifecycle import checkpoints
    from superpod.recipes.weights import huggingface

    huggingface.must_be_new(out)
    if (source / "config.json").is_file():
        huggingface.family(source)
        return Conversion("imported", f"{__name__}:import_hf", {"folder": str(source), "out": str(out)})
    if dtype not in ("", *DTYPES):
        raise UserError(f"--dtype {dtype} is none of {', '.join(DTYPES)}")
    if like and not (like / "config.json").is_file():
        raise UserError(f"--like {like} is no Hugging Face folder: it has no config.json")
    chosen = checkpoints.best(checkpoints.found(source))
    run = checkpoints.run_of(source)
    facts = run.facts if run else {}
    if finetune.FACT in facts:
        like = like or Path(facts["base"]) / huggingface.KEPT
    arguments: dict[str, Any] = {
        "checkpoint": str(chosen.path),
        "out": str(out),
        "like": str(like) if like else "",
        "dtype": dtype,
    }
    arguments["chat"] = finetune.FACT in facts
    return Conversion(f"exported {chosen.name}", f"{__name__}:export_hf", arguments)


DTYPES = ("bfloat16", "float16", "float32")


def import_hf(folder: str, out: str) -> None:
    """`huggingface.import_hf` with JSON's values."""
    from superpod.recipes.weights import huggingface

    huggingface.import_hf(Path(folder), Path(out))


def export_hf(checkpoint: str, out: str, like: str, dtype: str, chat: bool) -> dict[str, Any]:
    """`huggingface.export_hf` with JSON's values."""
    from superpod.recipes.weights import huggingface

    return huggingface.export_hf(Path(checkpoint), Path(out), Path(like) if like else None, dtype, chat)
