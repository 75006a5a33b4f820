"""The steps of a fine-tuning job before and after training: importing the model, and exporting the result.

Each is a job step with one task on the first node, in the environment of the ranks (launch/model_job.py). Standard
library only.
"""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

from superpod.errors import UserError
from superpod.runtime.runs import owner
from superpod.runtime.runs.run_folder import Attempt, RunFolder
from superpod.runtime.runs.run_state import State

BASE = "base"
"""Key of run.json: the NeMo checkpoint from which the run starts, imported by the job if it is missing."""
PACKED = "packed"
"""Key of run.json: the folder of its packed samples, if it is not the run folder."""

END_S = 10.0
"""Seconds that a stopped step may take to remove its incomplete output."""


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into the command of the ranks and, after `--`, that of the model steps; [] = none."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def refuse_unsafe_inputs(run: RunFolder) -> None:
    """Refuse an imported model or packed samples, which ranks unpickle, if another user could have written them.

    A folder given by the user (`--start`) is not checked, since it may belong to a colleague.

    Raises:
        UserError: the path and the reason.
    """
    runs = run.path.parents[1]
    places = [Path(str(run.facts[key])) for key in (BASE, PACKED) if run.facts.get(key)]
    for place in places:
        if place.exists() and runs in place.parents:  # RUNS/.models/MODEL, RUNS/.samples/ID/data
            own = runs.joinpath(*place.relative_to(runs).parts[:2])
            owner.refuse_replaceable(own)
            owner.refuse_writable(own, place)


def needs_import(run: RunFolder) -> bool:
    """Return whether the model of a run must still be imported."""
    base = run.facts.get(BASE)
    return bool(base) and not Path(str(base)).is_dir()


def import_model(command: list[str], run: RunFolder, attempt: Attempt) -> None:
    """Import the model, unless another run does so at the same time: the step holds a lock. Raises UserError."""
    attempt.mark(State.RUNNING, message="importing the model")
    code = _run([*command, "import", str(run.path)], attempt.path / "import.log")
    if code or needs_import(run):
        raise UserError(
            f"the model was not imported: {_last_line(attempt.path / 'import.log', code)}",
            "fix this, then run `recipes submit --resume`",
        )
    attempt.mark(State.RUNNING, message="")


def export(command: list[str], run: RunFolder, attempt: Attempt) -> str:
    """Export the Hugging Face folder of a trained run; returns an error message, '' on success."""
    attempt.mark(State.RUNNING, message="trained; exporting the best checkpoint")
    code = _run([*command, "export", str(run.path)], attempt.path / "export-step.log")
    if not code and not run.has_pending_export:
        return ""
    return f"trained, but {_last_line(attempt.path / 'export-step.log', code)}"


def _run(command: list[str], log: Path) -> int:
    """Run a step and return its exit code. If the wait is interrupted, the step is stopped."""
    with open(log, "ab") as sink:
        step = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True)
        try:
            return step.wait()
        finally:
            if step.poll() is None:
                step.terminate()  # srun forwards it
                with contextlib.suppress(subprocess.TimeoutExpired):
                    step.wait(END_S)
                step.kill()


def _last_line(log: Path, code: int) -> str:
    """Return the last line of a log that is not srun's, or else the exit code, and the path of the log."""
    lines = [line for line in log.read_text(errors="replace").strip().splitlines() if not line.startswith("srun: ")]
    if lines:
        return f"{lines[-1][-400:]} ({log})"
    return f"its step exited with {code} ({log})"
