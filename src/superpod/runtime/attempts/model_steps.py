"""The job steps of fine-tuning before and after training, which import the model and export the result.

Each has one task on the first node, in the environment of the ranks (launch/model_job.py). Standard library only.
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
"""Key of run.json: the NeMo checkpoint that the run starts from; the job imports it if it is missing."""
PACKED = "packed"
"""Key of run.json: the folder with packed samples, if it is not the run folder."""

END_S = 10.0
"""Seconds that a terminated step may take to remove its incomplete output."""


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments at `--` into the command for the ranks and the command for the model steps; [] = none."""
    index = words.index("--") if "--" in words else len(words)
    return words[:index], words[index + 1 :]


def refuse_unsafe_inputs(run: RunFolder) -> None:
    """Refuse an imported model or packed samples if another user could have written them, since ranks unpickle them.

    A folder given by the user (`--start`) is not checked, since it may belong to a colleague.

    Raises:
        UserError: with the path and the reason.
    """
    runs = run.path.parents[1]
    places = [Path(str(run.facts[key])) for key in (BASE, PACKED) if run.facts.get(key)]
    for place in places:
        if place.exists() and runs in place.parents:  # RUNS/.models/MODEL, RUNS/.samples/ID/data
            model_folder = runs.joinpath(*place.relative_to(runs).parts[:2])
            owner.refuse_replaceable(model_folder)
            owner.refuse_writable(model_folder, place)


def needs_import(run: RunFolder) -> bool:
    """Return whether the model of a run must still be imported."""
    base = run.facts.get(BASE)
    return bool(base) and not Path(str(base)).is_dir()


def import_model(command: list[str], run: RunFolder, attempt: Attempt) -> None:
    """Import the model, unless another run is importing it: the step holds a lock. Raises UserError."""
    attempt.mark(State.RUNNING, message="importing the model")
    code = _run([*command, "import", str(run.path)], attempt.path / "import.log")
    if code or needs_import(run):
        raise UserError(
            f"the model was not imported: {_last_line(attempt.path / 'import.log', code)}",
            "fix the problem, then run `recipes submit --resume`",
        )
    attempt.mark(State.RUNNING, message="")


def export(command: list[str], run: RunFolder, attempt: Attempt) -> str:
    """Export the Hugging Face folder of a trained run; return an error message, or '' on success."""
    attempt.mark(State.RUNNING, message="trained; exporting the best checkpoint")
    code = _run([*command, "export", str(run.path)], attempt.path / "export-step.log")
    if not code and not run.has_pending_export:
        return ""
    return f"trained, but {_last_line(attempt.path / 'export-step.log', code)}"


def _run(command: list[str], log: Path) -> int:
    """Run a step and return its exit code. If the wait is interrupted, terminate the step."""
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
    """Return the last line of a log that is not from srun, or the exit code if there is none, and the path of the
    log.
    """
    lines = [line for line in log.read_text(errors="replace").strip().splitlines() if not line.startswith("srun: ")]
    if lines:
        return f"{lines[-1][-400:]} ({log})"
    return f"its job step exited with {code} ({log})"
