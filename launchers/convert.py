"""Conversions from and to Hugging Face. `plan` chooses one without NeMo; `subprocess_call` then runs it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from superpod.errors import UserError


@dataclass(frozen=True)
class Conversion:
    """A function for `subprocess_call`, and a title that says what it did."""

    title: str
    function: str
    arguments: dict[str, str | bool]


def plan(source: Path, out: Path, like: Path | None = None, dtype: str = "") -> Conversion:
    """Convert a Hugging Face folder to NeMo, or a NeMo checkpoint, or the best one of a run, to Hugging Face.

    Raises:
        UserError: `source` is none of these or not whole, or `out` exists.
    """
    from superpod.launchers import finetune
    from superpod.lifecycle import checkpoints
    from superpod.recipes.weights import huggingface

    huggingface.must_be_new(out)
    if (source / "config.json").is_file():
        huggingface.family(source)
        return Conversion("imported", f"{__name__}:import_hf", {"folder": str(source), "out": str(out)})
    if dtype not in ("", *DTYPES):
        raise UserError(f"--dtype {dtype} is not one of {', '.join(DTYPES)}")
    if like and not (like / "config.json").is_file():
        raise UserError(f"--like {like} is not a Hugging Face folder: it has no config.json")
    chosen = checkpoints.best(checkpoints.at(source))
    run = checkpoints.run_of(source)
    facts = run.facts if run else {}
    if finetune.FACT in facts:  # a fine-tuning keeps the tokenizer and config of the folder that it imported
        like = like or Path(facts["base"]) / huggingface.KEPT
    arguments = {
        "checkpoint": str(chosen.path),
        "out": str(out),
        "like": str(like) if like else "",
        "dtype": dtype,
        "chat": finetune.FACT in facts,
    }
    return Conversion(f"exported {chosen.name}", f"{__name__}:export_hf", arguments)


DTYPES = ("bfloat16", "float16", "float32")


def import_hf(folder: str, out: str) -> None:
    """`huggingface.import_hf` with arguments that JSON can hold."""
    from superpod.recipes.weights import huggingface

    huggingface.import_hf(Path(folder), Path(out))


def export_hf(checkpoint: str, out: str, like: str, dtype: str, chat: bool) -> dict[str, Any]:
    """`huggingface.export_hf` with arguments that JSON can hold."""
    from superpod.recipes.weights import huggingface

    return huggingface.export_hf(Path(checkpoint), Path(out), Path(like) if like else None, dtype, chat)
