"""`recipes submit --resume RUN` with changes: what a run may change when it goes on, and its new batch script.

The script of the attempts so far, which holds their code, stays in the run folder as `job-until-NNN.sbatch`; where no
attempt has begun since the last change, as `job-until-NNN.2.sbatch` and so on.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.common.files import write_json
from superpod.errors import UserError
from superpod.planner.layout import PARALLEL_SIZES
from superpod.runtime.runs import run_state
from superpod.runtime.runs.run_folder import DONE
from superpod.slurm.profiles.profile_values import seconds
from superpod.slurm.script import batch_script
from superpod.slurm.submission import submit as slurm_submit

if TYPE_CHECKING:
    from superpod.requests.resolve import ResolvedRun
    from superpod.runtime.runs.run_folder import RunFolder
    from superpod.slurm.submission.submit import Submission

_TIME = re.compile(r"^#SBATCH --time=(\S+)$", re.MULTILINE)


def read_time_limit(run: RunFolder) -> str:
    """The time limit in a run's batch script; '' when it names none."""
    try:
        match = _TIME.search((run.path / slurm_submit.SCRIPT).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{run.path} was not submitted to Slurm: {error.strerror}: {slurm_submit.SCRIPT}") from None
    return match[1] if match else ""


def refuse_incompatible(before: ResolvedRun, after: ResolvedRun) -> None:
    """Refuse changes with which the run's checkpoints could not be resumed from.

    Raises:
        UserError: the size, the model or the layout would change; with each value, before and after.
    """
    sizes = _changed(before, after, ("nodes", "gpus_per_node"))
    layout = _changed(before.layout, after.layout, tuple(PARALLEL_SIZES))
    model = _changed(before.job.model, after.job.model, tuple(f.name for f in fields(before.job.model)))
    for changed, keeps in (
        (sizes, "keeps its size"),
        (model, "keeps its model, whose weights its checkpoints hold"),
        (layout, "keeps its layout, which the state of its optimizer is saved for"),
    ):
        if changed:
            raise UserError(
                f"a run {keeps} when it goes on, and this changes {', '.join(changed)}",
                "leave that out, or start a new run with it",
            )


def _changed(before: object, after: object, names: tuple[str, ...]) -> list[str]:
    pairs = {name: (getattr(before, name), getattr(after, name)) for name in names}
    return [f"{name} {old} -> {new}"[:200] for name, (old, new) in pairs.items() if old != new]


def changed_lines(run: RunFolder, after: ResolvedRun) -> list[str]:
    """What differs between the recipe that the run had and the one it goes on with: `path: old -> new`."""
    before = (run.path / "recipe.txt").read_text(encoding="utf-8").splitlines()
    old, new = (
        {path: value for path, _, value in (line.partition(" = ") for line in x)} for x in (before, after.lines)
    )
    paths = [path for path in (*old, *(p for p in new if p not in old)) if old.get(path) != new.get(path)]
    return [f"{path}: {old.get(path, '-')} -> {new.get(path, '-')}" for path in paths]


@contextmanager
def restored_on_failure(run: RunFolder) -> Iterator[None]:
    """Put the run's small files back as they were when what happens inside fails: sbatch may refuse."""
    names = (slurm_submit.SCRIPT, "run.json", "recipe.txt", "plan.json", DONE, run_state.STOP, run_state.RESUMED)
    kept = {name: (run.path / name).read_bytes() for name in names if (run.path / name).is_file()}
    known = set(run.path.glob("job-until-*"))
    try:
        yield
    except BaseException:
        for name in names:
            if name in kept:
                (run.path / name).write_bytes(kept[name])
            else:
                (run.path / name).unlink(missing_ok=True)
        for moved in set(run.path.glob("job-until-*")) - known:
            moved.unlink()  # the script is in its own place again
        raise


def rewrite(run: RunFolder, submission: Submission) -> None:
    """Let the run go on as `submission` says.

    Raises:
        UserError: the run is done at this many steps, or its folder cannot be written.
    """
    run.reopen(submission.run.max_steps)
    run.update(slurm_submit.facts(submission), submission.run.lines)
    run.write_plan(submission.plan)
    path = run.path / slurm_submit.SCRIPT
    path.rename(_archive_path(run))
    path.write_text(slurm_submit.script(submission, name=slurm_submit.job_name(str(run.path))), encoding="utf-8")


def _archive_path(run: RunFolder) -> Path:
    """A name, taken by nothing, for the script of the attempts so far."""
    last = f"{len(run.attempts):03d}"
    numbers = itertools.chain([last], (f"{last}.{count}" for count in itertools.count(2)))
    paths = (run.path / f"job-until-{number}.sbatch" for number in numbers)
    return next(path for path in paths if not path.exists())


def set_time(run: RunFolder, time: str) -> None:
    """Change only the time limit, in the run's batch script and facts, so that every later attempt has it.

    Raises:
        UserError: the script names no time limit.
    """
    path = run.path / slurm_submit.SCRIPT
    text = path.read_text(encoding="utf-8")
    if not _TIME.search(text):
        raise UserError(f"{path} has no line #SBATCH --time=...", "write one into it, and leave out --time")
    path.write_text(_TIME.sub(lambda _: batch_script.sbatch_line("time", time), text, count=1), encoding="utf-8")
    write_json(run.path / "run.json", run.facts | {"limit_s": seconds(time)})
