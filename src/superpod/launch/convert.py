"""Convert checkpoints between NeMo and Hugging Face.

`plan_conversion` does not need NeMo. `subprocess_call` runs the planned function in a separate process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from superpod.errors import UserError
from superpod.runtime.runs import run_facts


@dataclass(frozen=True)
class Conversion:
    """A function for `subprocess_call`, its arguments, and a title for the result."""

    title: str
    function: str
    arguments: dict[str, str | bool]
    gib: float = 0.0
    """estimated host memory, GiB"""


def plan_conversion(
    source: Path,
    out: Path,
    like: Path | None = None,
    dtype: str = "",
    adapter: bool = False,
    forward_check: bool = True,
) -> Conversion:
    """Plan the conversion of a Hugging Face folder to NeMo, or of a NeMo checkpoint to Hugging Face.

    Args:
        source: a Hugging Face folder, a NeMo checkpoint, or a run, whose best checkpoint is converted.
        out: the folder to write.
        like: Hugging Face folder with the config and tokenizer for `out`.
        dtype: dtype of the written weights; "" = unchanged.
        adapter: whether to write only the adapter, in PEFT's format.
        forward_check: whether to compare a forward pass of the result with transformers.

    Raises:
        UserError: `source` is incomplete or of another kind, or `out` exists.
    """
    from superpod.reports.runs import checkpoint_list
    from superpod.weights.finetuning import packed_data
    from superpod.weights.transfer import conversion

    conversion.require_new_output(out)
    if (source / "config.json").is_file():
        conversion.check_importable(source, forward_check)
        imported: dict[str, str | bool] = {"folder": str(source), "out": str(out), "forward_check": forward_check}
        return Conversion("imported", f"{__name__}:import_hf", imported, estimate_import_gib(source))
    if dtype not in ("", *DTYPES):
        raise UserError(f"--dtype {dtype} must be one of {', '.join(DTYPES)}")
    if like and not (like / "config.json").is_file():
        raise UserError(f"--like {like} is not a Hugging Face folder: it has no config.json")
    checkpoint = checkpoint_list.choose_best(checkpoint_list.list_checkpoints(source))
    if adapter and not checkpoint.adapter:
        raise UserError(f"{checkpoint.name} contains no adapter", "omit --adapter to export the complete model")
    run = checkpoint_list.find_run(source)
    facts = run.facts if run else {}
    chat = run_facts.FINETUNE in facts
    given, task = like, dict[str, Any]()
    if chat:  # a fine-tuning keeps the tokenizer and the config of the imported folder
        task = facts[run_facts.FINETUNE]
        original = Path(task["model"]) if task.get("start") else Path(facts["base"]) / conversion.KEPT
        like = like or packed_data.find_export_source(run.path if run else source, original)
    if adapter:
        base = _adapter_base(checkpoint.name, task, given, like)
        arguments = {"checkpoint": str(checkpoint.path), "out": str(out), "like": str(like), "base": base, "chat": chat}
        return Conversion(f"exported the adapter of {checkpoint.name}", f"{__name__}:export_adapter", arguments)
    arguments = {
        "checkpoint": str(checkpoint.path),
        "out": str(out),
        "like": str(like) if like else "",
        "dtype": dtype,
        "chat": chat,
        "forward_check": forward_check,
    }
    gib = 1.0 + COPIES * checkpoint.parameters * 4 / 2**30  # in fp32
    return Conversion(f"exported {checkpoint.name}", f"{__name__}:export_hf", arguments, gib)


def _adapter_base(name: str, task: Mapping[str, Any], given: Path | None, like: Path | None) -> str:
    """Return the Hugging Face folder of the base model of the adapter `name`. Raises UserError if it is unknown.

    `task` is the fine-tuning task that trained the adapter, {} if there was none; `given` is the value of --like, and
    `like` the same folder or the copy of its files in the fine-tuning run.
    """
    if task and not task.get("start"):
        return task["model"]
    if task and not given:
        raise UserError(
            f"{name} adapts the NeMo checkpoint {task['start']}, not {task['model']}",
            f"export that checkpoint with `recipes ckpt convert {task['start']} BASE`, then use --adapter --like BASE",
        )
    if not like:
        raise UserError(
            f"{name} does not record the Hugging Face folder of its base model",
            "specify the folder with --like; PEFT loads the base model from it",
        )
    return str(given or like)


DTYPES = ("bfloat16", "float16", "float32")
COPIES = 2.3
"""Host memory in copies of the weights: the transformers and NeMo models, and one layer and embeddings in fp32."""


def estimate_import_gib(folder: Path) -> float:
    """Return the estimated host memory for importing a Hugging Face folder, in GiB."""
    from superpod.weights.transfer import hf_folder

    return 1.0 + COPIES * hf_folder.count_weight_bytes(folder) / 2**30


def require_memory(gib: float, source: str) -> None:
    """Raise UserError if converting `source` needs more than the free host memory; `gib` is the estimated need."""
    from superpod.rehearsal.training.forked_run import available_gib

    available = available_gib()
    if gib > available:
        raise UserError(
            f"converting {source} needs about {gib:.0f} GiB of memory (weights in a NeMo and a transformers model), "
            f"but only {available:.0f} GiB are free",
            "convert on a node of a cluster: `recipes ckpt convert ... --cluster NAME`",
        )


def import_hf(folder: str, out: str, forward_check: bool = True) -> dict[str, Any]:
    """Import a Hugging Face folder to the NeMo checkpoint `out`: `conversion.import_hf` with JSON arguments."""
    from superpod.weights.transfer import conversion

    require_memory(estimate_import_gib(Path(folder)), folder)
    return conversion.import_hf(Path(folder), Path(out), forward_check=forward_check)


def export_hf(
    checkpoint: str, out: str, like: str, dtype: str, chat: bool, forward_check: bool = True
) -> dict[str, Any]:
    """Export a NeMo checkpoint to the folder `out`: `conversion.export_hf` with JSON arguments.

    The result also has the key `served`: the servers that can load the folder.
    """
    from superpod.weights.serving import servable
    from superpod.weights.transfer import conversion

    folder = Path(like) if like else None
    export_facts = conversion.export_hf(Path(checkpoint), Path(out), folder, dtype, chat, forward_check=forward_check)
    return {**export_facts, "served": servable.check_model(Path(out)).line}


def export_adapter(checkpoint: str, out: str, like: str, base: str, chat: bool) -> dict[str, Any]:
    """Export an adapter in PEFT's format to `out`; return `adapted`, the number of matrices, and `served`."""
    from superpod.weights.serving import servable
    from superpod.weights.transfer import adapter_export

    adapted = adapter_export.export_adapter(Path(checkpoint), Path(out), Path(like), base, chat=chat)
    return {"adapted": adapted, "served": servable.check_adapter(Path(out)).line}
