"""What a fine-tuning leaves beside its Hugging Face folder: the adapter for PEFT, an evaluation, who can serve it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.common.files import read_json
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.runtime.runs.run_folder import RunFolder

ADAPTER = "-adapter"
"""After the folder's name: where the adapter is."""
DEFAULT_ANSWERS = 3
"""Prompts of the validation data that the exported model answers."""
TOLERANCE, SHARE = 0.02, 0.02
"""Nats, and of the loss: so far may NeMo's loss (bf16 or FP8) and transformers' on the exported folder lie from each
other. Rounding makes up thousandths; a matrix in the wrong place is worth tenths and more."""
LINE = 100
"""Characters of a prompt or an answer that are printed."""


@dataclass(frozen=True)
class Evaluation:
    """The validation loss of an exported folder by transformers, and NeMo's own of the checkpoint; nats."""

    loss: float
    least: float
    most: float
    """of its global batches' losses, between which NeMo's mean of them lies"""
    tokens: int
    samples: int
    dtype: str
    answers: list[dict[str, str]]
    nemo: float | None

    @property
    def agrees(self) -> bool:
        """Whether both are the same but for rounding; True where NeMo's is not known."""
        if self.nemo is None:
            return True
        off = TOLERANCE + SHARE * abs(self.nemo)
        return self.least - off <= self.nemo <= self.most + off

    def lines(self) -> list[str]:
        """What to print."""
        import math

        beside = "" if self.nemo is None else f"; NeMo's of the checkpoint {self.nemo:.4f}"
        perplexity = math.exp(min(self.loss, 700.0))
        lines = [
            f"evaluation of the folder by transformers ({self.dtype}): validation loss {self.loss:.4f}, perplexity "
            f"{perplexity:.2f}, {self.tokens} tokens of {self.samples} samples{beside}"
        ]
        for answer in self.answers:
            words = {name: _shorten(text) for name, text in answer.items()}
            lines.append(f"  {words['prompt']} -> {words['answer']} (data: {words['expected']})")
        return lines

    def refusal(self, folder: Path) -> str:
        """What to say, loudly, where they do not agree."""
        return (
            f"{folder} is not the model that was trained: transformers' losses of the validation batches are "
            f"{self.least:.4f} to {self.most:.4f}, and NeMo's {self.nemo:.4f}; the tolerance is {TOLERANCE} + "
            f"{SHARE:.0%}. Do not serve it"
        )


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return json.dumps(line if len(line) <= LINE else f"...{line[-LINE:]}", ensure_ascii=False)


def adapter_folder(target: Path) -> Path:
    """Where the adapter of a run that exports to `target` is written."""
    return target.with_name(target.name + ADAPTER)


def is_adapter(run: RunFolder) -> bool:
    """Whether the best checkpoint of a run holds an adapter alone."""
    from superpod.reports.runs import checkpoints

    return checkpoints.best(checkpoints.at(run.path)).adapter


def export_adapter(run: RunFolder, target: Path) -> list[str]:
    """Write the adapter of the best checkpoint beside `target`; the lines to print. One that is there is replaced.

    A refusal of PEFT's format is a line too: the merged folder is there.
    """
    import shutil

    from superpod.launch import convert, subprocess_call

    out = adapter_folder(target)
    if out.is_dir() and (out / "adapter_config.json").is_file():
        shutil.rmtree(out)  # of an export that was cut off, or of fewer steps
    try:
        job = convert.plan_conversion(run.path, out, adapter=True)
        done = subprocess_call.call(job.function, run.attempts[-1].path / "adapter.log", **job.arguments)
    except UserError as refused:
        return [f"no adapter for PEFT: {refused}"]
    return [
        f"adapter of {done['adapted']} matrices for PEFT: {out}",
        f"  {done['served']}",
    ]


def evaluate(run: RunFolder, target: Path, nemo: float | None, answers: int = DEFAULT_ANSWERS) -> Evaluation:
    """Measure the folder on the run's validation data, in a process of its own.

    Args:
        run: a fine-tuning run, whose folder holds the packed data.
        target: the Hugging Face folder that it has written.
        nemo: the validation loss of the exported checkpoint, nats; None = unknown.
        answers: prompts to answer.

    Raises:
        SubprocessFailed: transformers could not load the folder or run it; with its last words.
    """
    from superpod.launch import finetune
    from superpod.launch.subprocess_call import SubprocessFailed
    from superpod.runtime.processes import watchdog
    from superpod.weights.finetune_setup import VALIDATION

    attempt = run.attempts[-1].path
    out, log = attempt / "evaluation.json", attempt / "evaluation.log"
    batch = (read_json(run.path / "plan.json") or {})["query"]["gbs"]
    words = [str(target), str(finetune.packed_folder(run) / VALIDATION), str(out), str(batch), str(answers)]
    command = [sys.executable, "-P", "-W", "ignore", "-m", "superpod.weights.serving.evaluate", *words]
    code = watchdog.run_logged(command, log)
    if code:
        last = (log.read_text(errors="replace").strip().splitlines() or [f"it ended with {code}"])[-1]
        raise SubprocessFailed(f"the exported folder cannot be evaluated: {last[:500]}; the log is {log}")
    measured: dict[str, Any] = json.loads(out.read_bytes())
    return Evaluation(**measured, nemo=nemo)


def logged_loss(run: RunFolder, checkpoint: str) -> float | None:
    """The validation loss of a checkpoint from the run's metrics, which has more digits than its name."""
    from superpod.runtime.checkpoints.checkpoints import step_of

    steps = step_of(checkpoint)
    lines = [line for line in run.metrics() if line.get("val_loss") is not None and line.get("step") == steps]
    return float(lines[-1]["val_loss"]) if lines else None


def write_artifacts(
    run: RunFolder, target: Path, exported: dict[str, Any], say: Callable[[str], None], *, evaluation: bool = True
) -> Evaluation | None:
    """Write and say all that comes after the merged folder; returns the evaluation, None where it was left out."""
    if is_adapter(run):
        for line in export_adapter(run, target):
            say(line)
    say(exported["served"])
    if not evaluation:
        return None
    loss = logged_loss(run, exported["checkpoint"])
    measured = evaluate(run, target, exported["val_loss"] if loss is None else loss)
    for line in measured.lines():
        say(line)
    return measured
