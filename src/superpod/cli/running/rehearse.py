"""`recipes rehearse`: train a recipe, shrunk to this machine's CPUs, in its own layout, and check the result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.options.request_options import AsJson, Name, Overrides, request_of
from superpod.cli.options.size_options import SizeOptions, with_size
from superpod.errors import UserError, counted

if TYPE_CHECKING:
    import subprocess

    from superpod.rehearsal.trial import Trial
    from superpod.requests.request import Request

LEAST_STEPS, MOST_STEPS = 4, 1000
LIMIT_S = 900
"""Seconds until a user's file is planned, NeMo's import included; the rehearsal has limits of its own."""
AS_CHILD = "from superpod.cli import main; from superpod.cli.running import rehearse; rehearse.as_child(main)"
_marks: list[Path] = []
"""In the child that rehearses a user's file: the folder in which it tells its parent how far it came."""


@with_size
def rehearse(
    name: Name,
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option(min=1, max=1024, help="Most processes to use; a larger layout is folded.")] = 12,
    steps: Annotated[int, typer.Option(min=LEAST_STEPS, max=MOST_STEPS, help="Steps of training.")] = 10,
    *,
    size: SizeOptions,
    as_json: AsJson = False,
) -> None:
    """Train a recipe's shrunk self on CPUs in its own layout, and compare it with one rank.

    NAME is a recipe, a Python file with recipe(), from `recipes export`, or NeMo's own: nemo:llama3_8b.
    """
    import shutil
    import tempfile

    from superpod.collection import installed
    from superpod.requests import subject

    request = _request(name, overrides, size)
    if not _marks:  # else done by the parent
        installed.require("rehearsing a recipe")
    if subject.subject_kind(name) == "file" and not _marks:
        raise typer.Exit(_in_a_process_of_its_own(name))
    from superpod.rehearsal import trial as trials

    trial = _planned(request, ranks)
    _mark("planned")
    _enough_memory(trial.shrunk.job.gpus)
    if not as_json:
        print(_before(trial))
    folder = Path(tempfile.mkdtemp(prefix="recipes-rehearse-"))
    try:
        _conduct(trial, folder, steps)
    finally:
        if trial.passed:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(trials.facts(trial), indent=1) if as_json else _after(trial), flush=True)
    if not trial.passed:
        if not as_json:
            print(f"logs of every rank: {folder}")
        raise typer.Exit(1)


def _request(name: str, overrides: list[str] | None, size: SizeOptions) -> Request:
    """What to rehearse, checked without NeMo."""
    from superpod.requests import subject

    if subject.subject_kind(name) == "recipe":
        return request_of(name, overrides, None, size)
    if size.layout is not None:
        raise UserError(f"--layout is for recipes; {name} has its own", "write trainer.strategy.* overrides")
    request = size.request(name, overrides)
    request.check(any_subject=True)
    return request


def _in_a_process_of_its_own(name: str) -> int:
    """Rehearse a user's file in a child, with this command's words; returns its exit code.

    Raises:
        UserError: no such file, or it ended the child.
    """
    import subprocess
    import sys
    import tempfile

    from superpod.launch import redacted_output

    with tempfile.TemporaryDirectory(prefix="recipes-rehearse-") as folder:
        # -P: a folder that is called nemo, where the command was typed, is not what is imported.
        start = ["-P", "-W", "ignore", "-c", AS_CHILD, folder]
        words = [sys.executable, *start, *sys.argv[1:]]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
        with redacted_output.forward_output(process):
            try:
                code = _waited(process, Path(folder))
            finally:
                process.kill()
                process.wait()
        if code is None:
            raise UserError(f"{name}: took more than {LIMIT_S} s before it was planned", "recipe() waits for nothing")
        if not Path(folder, "ended").exists():
            raise UserError(f"{name}: its process ended, with code {code}, before the rehearsal did", "see above")
    return code


def _waited(process: subprocess.Popen[str], folder: Path) -> int | None:
    """The child's exit code; None where it hangs before its file is planned."""
    import subprocess

    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return process.wait() if Path(folder, "planned").exists() else None


def as_child(main: Callable[[], None]) -> None:
    """The command, as the child that rehearses a user's file: the first argument is the folder for its marks."""
    import sys

    from superpod.common.parent_death import end_with_parent

    end_with_parent()
    _marks.append(Path(sys.argv.pop(1)))
    try:
        main()
    except SystemExit:
        _mark("ended")  # by itself; os._exit in a user's file comes by here never
        raise
    _mark("ended")


def _mark(name: str) -> None:
    for folder in _marks:
        folder.joinpath(name).touch()


def _planned(request: Request, ranks: int) -> Trial:
    from superpod.cli.running.progress import quiet_wait
    from superpod.rehearsal import trial as trials
    from superpod.requests import subject

    if not request.overrides and subject.subject_kind(request.recipe) == "recipe":
        return trials.plan_request(request, ranks)
    with quiet_wait("importing NeMo and shrinking the recipe (10 to 30 s)"):  # to apply the overrides
        return trials.plan_request(request, ranks)


def _conduct(trial: Trial, folder: Path, steps: int) -> None:
    import os

    from superpod.cli import tables
    from superpod.common.quiet import quietly
    from superpod.rehearsal import trial as trials

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a rehearsal uses no GPU, even where there is one
    with quietly(folder / "rehearse.log") as terminal:
        console = tables.console(terminal)
        trials.conduct(trial, folder, steps, note=lambda what: console.print(f"[dim]{what} ...[/]"))


def _enough_memory(ranks: int) -> None:
    """Refuse more ranks than this machine's memory holds. Forked ranks share NeMo's pages: each takes under 0.8 GB."""
    from superpod.rehearsal.training.forked_run import RANK_GIB, available_gib

    need, have = 1.0 + ranks * RANK_GIB, available_gib()
    if need > have:
        raise UserError(
            f"{ranks} ranks take about {need:.1f} GiB, and {have:.1f} GiB are free", f"try --ranks {max(1, ranks // 2)}"
        )


def _before(trial: Trial) -> str:
    job = trial.shrunk.job
    lines = [
        f"{trial.recipe} at {counted(trial.nodes, 'node')} on {counted(job.gpus, 'CPU rank')}: {trial.shrunk.topology}",
        "shrunk:",
    ]
    lines += [f"  {size.name} {size.old} -> {size.new}" for size in trial.shrunk.sizes]
    return "\n".join([*lines, "data: mock data, random tokens"])


def _after(trial: Trial) -> str:
    from superpod.rehearsal.trial import CANNOT_SHOW

    lines = ["changed:", *(f"  {change.path or 'recipe'}: {change.new}  ({change.reason})" for change in trial.changes)]
    listed = ", ".join(f"{name}={value}" for name, value in trial.dropped.items())
    lines += [f"GPU-only settings switched off: {listed or 'none'}", ""]
    lines += [f"{'pass' if check.passed else 'FAIL'}  {check.name}: {check.message}" for check in trial.checks]
    lines += [f"time: {', '.join(f'{name} {seconds:.0f} s' for name, seconds in trial.seconds.items())}"]
    lines += [f"a rehearsal cannot show: {CANNOT_SHOW}", "passed" if trial.passed else "failed"]
    return "\n".join(lines)
