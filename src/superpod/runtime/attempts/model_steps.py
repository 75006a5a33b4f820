"""What a job of a fine-tuning does beside training: it imports the model before, and exports the folder after it.

Either is a step of one task on the first node, in the environment of the ranks (launch/model_job.py). Standard
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
"""Key of run.json: the NeMo checkpoint that the run starts from, which the job makes where it is missing."""
PACKED = "packed"
"""Key of run.json: the folder of its packed samples, where they are not in the run folder."""

END_S = 10.0
"""How long a step that is stopped may take to remove what it has half written, seconds."""


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """The command of the ranks and, after a `--`, that of a step of one task; [] where the run needs none."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def refuse_unsafe_inputs(run: RunFolder) -> None:
    """Refuse an imported model or packed samples, which ranks unpickle, that another user could have written.

    A folder that the user has named (`--start`) is not judged: it may well be a colleague's.

    Raises:
        UserError: which one, and why.
    """
    runs = run.path.parents[1]
    places = [Path(str(run.facts[key])) for key in (BASE, PACKED) if run.facts.get(key)]
    for place in places:
        if place.exists() and runs in place.parents:  # RUNS/.models/MODEL, RUNS/.samples/ID/data
            own = runs.joinpath(*place.relative_to(runs).parts[:2])
            owner.refuse_replaceable(own)
            owner.refuse_writable(own, place)


def to_import(run: RunFolder) -> bool:
    """Whether the model of a run must still be imported."""
    base = run.facts.get(BASE)
    return bool(base) and not Path(str(base)).is_dir()


def import_model(command: list[str], run: RunFolder, attempt: Attempt) -> None:
    """Import the model, once for all runs that start from it: the step takes its lock. Raises UserError."""
    attempt.mark(State.RUNNING, message="importing the model")
    code = _run([*command, "import", str(run.path)], attempt.path / "import.log")
    if code or to_import(run):
        raise UserError(
            f"the model was not imported: {_last_words(attempt.path / 'import.log', code)}",
            "mend it, then `recipes submit --resume`",
        )
    attempt.mark(State.RUNNING, message="")


def export(command: list[str], run: RunFolder, attempt: Attempt) -> str:
    """Write the Hugging Face folder of a trained run; returns what went wrong, '' for nothing."""
    attempt.mark(State.RUNNING, message="trained; exporting the best checkpoint")
    code = _run([*command, "export", str(run.path)], attempt.path / "export-step.log")
    if not code and not run.has_pending_export:
        return ""
    return f"trained, but {_last_words(attempt.path / 'export-step.log', code)}"


def _run(command: list[str], log: Path) -> int:
    """The exit code of a step. Whatever ends this process's waiting ends the step too."""
    with open(log, "ab") as sink:
        step = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True)
        try:
            return step.wait()
        finally:
            if step.poll() is None:
                step.terminate()  # srun passes it on
                with contextlib.suppress(subprocess.TimeoutExpired):
                    step.wait(END_S)
                step.kill()


def _last_words(log: Path, code: int) -> str:
    lines = [line for line in log.read_text(errors="replace").strip().splitlines() if not line.startswith("srun: ")]
    return f"{lines[-1][-400:] if lines else f'its step ended with {code}'} ({log})"
