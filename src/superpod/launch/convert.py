"""Conversions from and to Hugging Face. `plan` chooses one without NeMo; `subprocess_call` then runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from superpod.errors import UserError
from superpod.runtime.runs import run_facts


@dataclass(frozen=True)
class Conversion:
    """A function for `subprocess_call`, and a title that says what it did."""

    title: str
    function: str
    arguments: dict[str, str | bool]
    gib: float = 0.0
    """Memory that it takes, about."""


def plan_conversion(
    source: Path,
    out: Path,
    like: Path | None = None,
    dtype: str = "",
    adapter: bool = False,
    forward_check: bool = True,
) -> Conversion:
    """Convert a Hugging Face folder to NeMo, or a NeMo checkpoint, or the best one of a run, to Hugging Face.

    With `adapter`, only the adapter is written, in PEFT's format. Without `forward_check`, the result is not held
    against transformers.

    Raises:
        UserError: `source` is none of these or not whole, memory is short, or `out` exists.
    """
    from superpod.reports.runs import checkpoints
    from superpod.weights import finetune_data
    from superpod.weights.transfer import huggingface

    huggingface.must_be_new(out)
    if (source / "config.json").is_file():
        huggingface.importable(source, forward_check)
        wanted: dict[str, str | bool] = {"folder": str(source), "out": str(out), "forward_check": forward_check}
        return Conversion("imported", f"{__name__}:import_hf", wanted, import_gib(source))
    if dtype not in ("", *DTYPES):
        raise UserError(f"--dtype {dtype} is not one of {', '.join(DTYPES)}")
    if like and not (like / "config.json").is_file():
        raise UserError(f"--like {like} is not a Hugging Face folder: it has no config.json")
    chosen = checkpoints.best(checkpoints.at(source))
    if adapter and not chosen.adapter:
        raise UserError(f"{chosen.name} has no adapter", "leave out --adapter: the whole model is exported")
    run = checkpoints.run_of(source)
    facts = run.facts if run else {}
    given, task = like, dict[str, Any]()
    if run_facts.FINETUNE in facts:  # a fine-tuning keeps the tokenizer and config of the folder that it imported
        given, task = like, facts[run_facts.FINETUNE]
        original = Path(task["model"]) if task.get("start") else Path(facts["base"]) / huggingface.KEPT
        like = like or finetune_data.kept(run.path if run else source, original)
    chat = run_facts.FINETUNE in facts
    if adapter:
        base = _adapter_base(chosen.name, task, given, like)
        arguments = {"checkpoint": str(chosen.path), "out": str(out), "like": str(like), "base": base, "chat": chat}
        return Conversion(f"exported the adapter of {chosen.name}", f"{__name__}:export_adapter", arguments)
    arguments = {
        "checkpoint": str(chosen.path),
        "out": str(out),
        "like": str(like) if like else "",
        "dtype": dtype,
        "chat": chat,
        "forward_check": forward_check,
    }
    gib = 1.0 + COPIES * chosen.parameters * 4 / 2**30  # in fp32
    return Conversion(f"exported {chosen.name}", f"{__name__}:export_hf", arguments, gib)


def _adapter_base(name: str, task: Mapping[str, Any], given: Path | None, like: Path | None) -> str:
    """The Hugging Face folder that the adapter of a checkpoint belongs to.

    Args:
        name: of the checkpoint.
        task: of the fine-tuning that has trained it; {} = another run.
        given: the folder that --like names.
        like: that folder, or the one whose files the fine-tuning kept.

    Raises:
        UserError: nothing says which it is.
    """
    if task and not task.get("start"):
        return task["model"]
    if task and not given:
        raise UserError(
            f"{name} adapts the NeMo checkpoint {task['start']}, not {task['model']}",
            f"export that one first (recipes ckpt convert {task['start']} BASE), then --adapter --like BASE",
        )
    if not like:
        raise UserError(
            f"{name} does not say which Hugging Face folder it adapts",
            "name it with --like: whoever loads the adapter looks there for the base model",
        )
    return str(given or like)


DTYPES = ("bfloat16", "float16", "float32")


COPIES = 2.3
"""The weights so many times: transformers' model, NeMo's, and a layer, the embeddings and the output in fp32."""


def import_gib(folder: Path) -> float:
    """Memory that the import of a Hugging Face folder takes."""
    from superpod.weights.transfer import folder as hf_folder

    return 1.0 + COPIES * hf_folder.size(folder) / 2**30


def require_memory(gib: float, what: str) -> None:
    """Refuse a conversion that this machine's memory does not hold; needs no NeMo.

    Raises:
        UserError: with both numbers.
    """
    from superpod.rehearsal.training.forked_run import available_gib

    have = available_gib()
    if gib > have:
        raise UserError(
            f"converting {what} takes about {gib:.0f} GiB of memory (the weights in NeMo's and transformers' model), "
            f"and {have:.0f} GiB are free",
            "`recipes ckpt convert ... --cluster NAME` converts on a node",
        )


def import_hf(folder: str, out: str, forward_check: bool = True) -> dict[str, Any]:
    """`huggingface.import_hf` with arguments that JSON can hold."""
    from superpod.weights.transfer import huggingface

    require_memory(import_gib(Path(folder)), folder)
    return huggingface.import_hf(Path(folder), Path(out), forward_check=forward_check)


def export_hf(
    checkpoint: str, out: str, like: str, dtype: str, chat: bool, forward_check: bool = True
) -> dict[str, Any]:
    """`huggingface.export_hf` with arguments that JSON can hold; `served` says who can load the folder."""
    from superpod.weights.serving import serving
    from superpod.weights.transfer import huggingface

    folder = Path(like) if like else None
    done = huggingface.export_hf(Path(checkpoint), Path(out), folder, dtype, chat, forward_check=forward_check)
    return {**done, "served": serving.check(Path(out)).line}


def export_adapter(checkpoint: str, out: str, like: str, base: str, chat: bool) -> dict[str, Any]:
    """`adapters.export` with arguments that JSON can hold; `served` as in `export_hf`."""
    from superpod.weights.serving import serving
    from superpod.weights.transfer import adapters

    adapted = adapters.export(Path(checkpoint), Path(out), Path(like), base, chat=chat)
    return {"adapted": adapted, "served": serving.check_adapter(Path(out)).line}
