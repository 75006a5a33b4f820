"""Run the job steps of fine-tuning that import the model before the training and export it afterwards.

Each step has one task on the first node, in the environment of the ranks (launch/model_job.py). Standard library only.
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
"""Key of run.json: the NeMo checkpoint from which the run starts. The job imports it if it does not exist."""
PACKED = "packed"
"""Key of run.json: the folder with the packed samples, if it is not the run folder."""

END_S = 10.0
"""Seconds that a terminated step may take to remove its incomplete output."""


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """Split `words` at `--` into the commands of the ranks and the model steps; the latter is [] if there is none."""
    index = words.index("--") if "--" in words else len(words)
    return words[:index], words[index + 1 :]


def refuse_unsafe_inputs(run: RunFolder) -> None:
    """Refuse a run whose imported model or packed samples another user could have written, since ranks unpickle them.

    A folder outside RUNS (`--start`) is not checked, since it may belong to a colleague. Raises UserError if another
    user could have written one of the folders.
    """
    runs = run.path.parents[1]
    inputs = [Path(str(run.facts[key])) for key in (BASE, PACKED) if run.facts.get(key)]
    for folder in inputs:
        if folder.exists() and runs in folder.parents:
            top = runs.joinpath(*folder.relative_to(runs).parts[:2])  # RUNS/.models/MODEL or RUNS/.samples/ID
            owner.refuse_replaceable(top)
            owner.refuse_writable(top, folder)


def needs_import(run: RunFolder) -> bool:
    """Return whether the run starts from a model that has not been imported yet."""
    base = run.facts.get(BASE)
    return bool(base) and not Path(str(base)).is_dir()


def import_model(command: list[str], run: RunFolder, attempt: Attempt) -> None:
    """Import the model of a run with a job step, which waits if another run is importing the same model.

    Raises UserError if the import failed; the message has the last line of its log.
    """
    attempt.mark(State.RUNNING, message="importing the model")
    code = _run([*command, "import", str(run.path)], attempt.path / "import.log")
    if code or needs_import(run):
        raise UserError(
            f"the model was not imported: {_last_line(attempt.path / 'import.log', code)}",
            "fix the problem, then run `recipes submit --resume`",
        )
    attempt.mark(State.RUNNING, message="")


def export(command: list[str], run: RunFolder, attempt: Attempt) -> str:
    """Export a trained run to a Hugging Face folder with a job step; return an error message, or '' on success."""
    attempt.mark(State.RUNNING, message="trained; exporting the best checkpoint")
    code = _run([*command, "export", str(run.path)], attempt.path / "export-step.log")
    if not code and not run.has_pending_export:
        return ""
    return f"trained, but {_last_line(attempt.path / 'export-step.log', code)}"


def _run(command: list[str], log: Path) -> int:
    """Run a job step, append its output to `log`, and return its exit code. Terminate it if a signal ends the wait."""
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
    """Return `TEXT (LOG)` with the last line of the log that is not from srun; without one, with the exit code."""
    lines = [line for line in log.read_text(errors="replace").strip().splitlines() if not line.startswith("srun: ")]
    if lines:
        return f"{lines[-1][-400:]} ({log})"
    return f"its job step exited with {code} ({log})"
