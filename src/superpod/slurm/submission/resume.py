"""`recipes submit --resume RUN` with overrides: refuses incompatible changes, and rewrites the batch script of the run.

The previous script, which contains the code of the previous attempts, is kept in the run folder as
`job-until-NNN.sbatch`, or as `job-until-NNN.2.sbatch` and so on if no attempt has started since the last change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.common.json_files import write_json
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
    """Return the time limit in a run's batch script; "" if the script has none.

    Raises:
        UserError: the run has no batch script.
    """
    try:
        match = _TIME.search((run.path / slurm_submit.SCRIPT).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{run.path} was not submitted to Slurm: {error.strerror}: {slurm_submit.SCRIPT}",
            "`recipes run --resume` resumes a local run",
        ) from None
    return match[1] if match else ""


def refuse_incompatible(before: ResolvedRun, after: ResolvedRun) -> None:
    """Check that a changed run can still load its checkpoints.

    Raises:
        UserError: the size, the model or the layout would change; the message contains the old and new values.
    """
    sizes = _list_changes(before, after, ("nodes", "gpus_per_node"))
    layout = _list_changes(before.layout, after.layout, tuple(PARALLEL_SIZES))
    model = _list_changes(before.job.model, after.job.model, tuple(f.name for f in fields(before.job.model)))
    for changed, rule in (
        (sizes, "must keep its size"),
        (model, "must keep its model, because its checkpoints contain the weights"),
        (layout, "must keep its layout, for which its optimizer states are saved"),
    ):
        if changed:
            raise UserError(
                f"a resumed run {rule}, but this would change {', '.join(changed)}",
                "leave out the change, or start a new run with it",
            )


def _list_changes(before: object, after: object, names: tuple[str, ...]) -> list[str]:
    """Return the attributes `names` that differ between two objects, as `name old -> new`."""
    pairs = {name: (getattr(before, name), getattr(after, name)) for name in names}
    return [f"{name} {old} -> {new}"[:200] for name, (old, new) in pairs.items() if old != new]


def changed_lines(run: RunFolder, resolved_run: ResolvedRun) -> list[str]:
    """Return the differences between the previous and the new recipe of a run, as `path: old -> new`."""
    old_lines = _read_lines((run.path / "recipe.txt").read_text(encoding="utf-8").splitlines())
    new_lines = _read_lines(resolved_run.lines)
    paths = [path for path in old_lines | new_lines if old_lines.get(path) != new_lines.get(path)]
    return [f"{path}: {old_lines.get(path, '-')} -> {new_lines.get(path, '-')}" for path in paths]


def _read_lines(lines: Sequence[str]) -> dict[str, str]:
    """Return the values in lines `path = value`, by path."""
    return {path: value for path, _, value in (line.partition(" = ") for line in lines)}


@contextmanager
def restore_on_failure(run: RunFolder) -> Iterator[None]:
    """Restore the files that `rewrite` and `set_time` change if the block fails, as when sbatch rejects the job."""
    names = (slurm_submit.SCRIPT, "run.json", "recipe.txt", "plan.json", DONE, run_state.STOP, run_state.RESUMED)
    contents = {name: (run.path / name).read_bytes() for name in names if (run.path / name).is_file()}
    archived = set(run.path.glob("job-until-*"))
    try:
        yield
    except BaseException:
        for name in names:
            if name in contents:
                (run.path / name).write_bytes(contents[name])
            else:
                (run.path / name).unlink(missing_ok=True)
        for path in set(run.path.glob("job-until-*")) - archived:
            path.unlink()  # the script has been restored under its own name
        raise


def rewrite(run: RunFolder, submission: Submission) -> None:
    """Rewrite run.json, plan.json, recipe.txt and the batch script of a run for `submission`, for its next attempts.

    Raises:
        UserError: the run has already reached the number of steps, or its folder is not writable.
    """
    run.reopen(submission.run.max_steps)
    run.update(slurm_submit.facts(submission), submission.run.lines)
    run.write_plan(submission.plan)
    path = run.path / slurm_submit.SCRIPT
    path.rename(_archive_path(run))
    path.write_text(slurm_submit.script(submission, name=slurm_submit.job_name(str(run.path))), encoding="utf-8")


def _archive_path(run: RunFolder) -> Path:
    """Return an unused path for the batch script of the previous attempts."""
    stem = f"job-until-{len(run.attempts):03d}"
    path = run.path / f"{stem}.sbatch"
    count = 2
    while path.exists():
        path = run.path / f"{stem}.{count}.sbatch"
        count += 1
    return path


def set_time(run: RunFolder, time: str) -> None:
    """Set the time limit of all further attempts, in the batch script of a run and in run.json.

    Raises:
        UserError: the script has no time limit.
    """
    path = run.path / slurm_submit.SCRIPT
    text = path.read_text(encoding="utf-8")
    if not _TIME.search(text):
        raise UserError(f"{path} has no #SBATCH --time=... line", "add the line to the script, and leave out --time")
    path.write_text(_TIME.sub(lambda _: batch_script.sbatch_line("time", time), text, count=1), encoding="utf-8")
    write_json(run.path / "run.json", run.facts | {"limit_s": seconds(time)})
