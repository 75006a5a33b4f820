"""Export the PEFT adapter of a fine-tuning run, and evaluate its exported Hugging Face folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.common.json_files import read_json
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.runtime.runs.run_folder import RunFolder

ADAPTER = "-adapter"
"""Suffix of the name of the adapter's folder."""
DEFAULT_ANSWERS = 3
"""Default number of prompts from the validation data that the exported model answers."""
TOLERANCE, SHARE = 0.02, 0.02
"""Permitted difference between the losses in NeMo (bf16 or FP8) and in transformers: absolute in nats, plus a share of
the loss. Rounding causes differences of thousandths, a misplaced matrix differences of tenths or more."""
MAX_LINE_LENGTH = 100
"""Maximum number of characters of a prompt or an answer to print."""


@dataclass(frozen=True)
class Evaluation:
    """The validation losses of an exported folder in transformers and of its checkpoint in NeMo, in nats per token."""

    loss: float
    """mean in transformers"""
    least: float
    most: float
    """minimum and maximum of the losses per global batch; the loss in NeMo is the mean over batches"""
    tokens: int
    samples: int
    dtype: str
    answers: list[dict[str, str]]
    nemo: float | None
    """loss in NeMo; None = unknown"""

    @property
    def agrees(self) -> bool:
        """Whether the losses agree within the tolerance; True if the loss in NeMo is unknown."""
        if self.nemo is None:
            return True
        tolerance = TOLERANCE + SHARE * abs(self.nemo)
        return self.least - tolerance <= self.nemo <= self.most + tolerance

    def lines(self) -> list[str]:
        """Return the evaluation and the answers as lines to print."""
        import math

        perplexity = math.exp(min(self.loss, 700.0))
        summary = (
            f"evaluation of the folder with transformers ({self.dtype}): validation loss {self.loss:.4f}, perplexity "
            f"{perplexity:.2f}, {self.tokens} tokens in {self.samples} samples"
        )
        if self.nemo is not None:
            summary += f"; loss of the checkpoint in NeMo: {self.nemo:.4f}"
        lines = [summary]
        for answer in self.answers:
            short = {name: _shorten(text) for name, text in answer.items()}
            lines.append(f"  {short['prompt']} -> {short['answer']} (data: {short['expected']})")
        return lines

    def mismatch_message(self, folder: Path) -> str:
        """Return the error message for losses that do not agree; `folder` is the exported folder."""
        return (
            f"{folder} does not contain the trained model: in transformers, the losses of the validation batches are "
            f"{self.least:.4f} to {self.most:.4f}, but in NeMo, the loss is {self.nemo:.4f}; the tolerance is "
            f"{TOLERANCE} + {SHARE:.0%}. Do not serve this model"
        )


def _shorten(text: str) -> str:
    """Return the last MAX_LINE_LENGTH characters of a text as a JSON string."""
    line = " ".join(text.split())
    return json.dumps(line if len(line) <= MAX_LINE_LENGTH else f"...{line[-MAX_LINE_LENGTH:]}", ensure_ascii=False)


def adapter_folder(target: Path) -> Path:
    """Return the folder for the adapter of a run whose exported folder is `target`."""
    return target.with_name(target.name + ADAPTER)


def is_adapter(run: RunFolder) -> bool:
    """Return whether the best checkpoint of a run contains only an adapter."""
    from superpod.reports.runs import checkpoint_list

    return checkpoint_list.choose_best(checkpoint_list.list_checkpoints(run.path)).adapter


def export_adapter(run: RunFolder, target: Path) -> list[str]:
    """Export the adapter of the best checkpoint next to `target`, replacing an earlier one; return lines to print.

    If PEFT's format cannot represent the adapter, the line has the reason. No error is raised, since the folder with
    the merged weights exists.
    """
    import shutil

    from superpod.launch import convert, subprocess_call

    out = adapter_folder(target)
    if out.is_dir() and (out / "adapter_config.json").is_file():
        shutil.rmtree(out)  # from an interrupted export, or from fewer steps
    try:
        job = convert.plan_conversion(run.path, out, adapter=True)
        export_facts = subprocess_call.call(job.function, run.attempts[-1].path / "adapter.log", **job.arguments)
    except UserError as refused:
        return [f"no adapter for PEFT: {refused}"]
    return [f"adapter for PEFT, {export_facts['adapted']} matrices: {out}", f"  {export_facts['served']}"]


def evaluate(run: RunFolder, target: Path, nemo: float | None, answers: int = DEFAULT_ANSWERS) -> Evaluation:
    """Measure the loss of the exported folder `target` on a run's validation data with transformers.

    `nemo` is the validation loss of the checkpoint in NeMo in nats, None = unknown; `answers` is the number of prompts
    to answer. Raises SubprocessFailed, with the last line of the log, if transformers cannot load or run the model.
    """
    from superpod.launch.finetuning import finetune
    from superpod.launch.subprocess_call import SubprocessFailed
    from superpod.runtime.processes import watchdog
    from superpod.weights.finetuning.data_and_weights import VALIDATION

    attempt = run.attempts[-1].path
    out, log = attempt / "evaluation.json", attempt / "evaluation.log"
    batch = (read_json(run.path / "plan.json") or {})["query"]["gbs"]
    arguments = [str(target), str(finetune.packed_folder(run) / VALIDATION), str(out), str(batch), str(answers)]
    command = [sys.executable, "-P", "-W", "ignore", "-m", "superpod.weights.serving.evaluate", *arguments]
    code = watchdog.run_logged(command, log)
    if code:
        # The last line of a traceback names the exception.
        last = (log.read_text(errors="replace").strip().splitlines() or [f"exit code {code}"])[-1]
        raise SubprocessFailed(f"the exported folder cannot be evaluated: {last[:500]}; see {log}")
    measured: dict[str, Any] = json.loads(out.read_bytes())
    return Evaluation(**measured, nemo=nemo)


def logged_loss(run: RunFolder, checkpoint: str) -> float | None:
    """Return the validation loss of a checkpoint from the run's metrics, None if missing. Its name has fewer digits."""
    from superpod.runtime.checkpoints.checkpoint_folder import step_of

    steps = step_of(checkpoint)
    lines = [line for line in run.metrics() if line.get("val_loss") is not None and line.get("step") == steps]
    return float(lines[-1]["val_loss"]) if lines else None


def write_artifacts(
    run: RunFolder, target: Path, export: dict[str, Any], log: Callable[[str], None], *, evaluation: bool = True
) -> Evaluation | None:
    """Export the adapter of a run, if it has one, and evaluate its exported folder `target`; return the evaluation.

    `export` is the result of `finetune.export`; `log` is called with each line to print. The result is None if
    `evaluation` is False.
    """
    if is_adapter(run):
        for line in export_adapter(run, target):
            log(line)
    log(export["served"])
    if not evaluation:
        return None
    loss = logged_loss(run, export["checkpoint"])
    result = evaluate(run, target, export["val_loss"] if loss is None else loss)
    for line in result.lines():
        log(line)
    return result
