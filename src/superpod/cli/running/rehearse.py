"""`recipes rehearse`: train a smaller model with a recipe's parallel layout on CPUs, and check the result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli import tables
from superpod.cli.options.request_options import AsJson, Name, Overrides, make_request
from superpod.cli.options.size_options import SizeOptions, with_size
from superpod.errors import UserError, counted
from superpod.requests import subject

if TYPE_CHECKING:
    import subprocess

    from superpod.rehearsal.rehearsal_run import Rehearsal
    from superpod.requests.request import Request

MIN_STEPS, MAX_STEPS = 4, 1000
LIMIT_S = 900
"""Time limit in seconds for importing NeMo and planning the rehearsal of a user's file."""
CHILD_CODE = "from superpod.cli import main; from superpod.cli.running import rehearse; rehearse.run_as_child(main)"
_child_folder: list[Path] = []
"""The folder for the marker files that the parent process reads; empty except in a child process (`run_as_child`)."""


@with_size
def rehearse(
    name: Name,
    overrides: Overrides = None,
    ranks: Annotated[
        int, typer.Option(min=1, max=1024, help="Maximum number of processes (layouts are reduced).")
    ] = 12,
    steps: Annotated[int, typer.Option(min=MIN_STEPS, max=MAX_STEPS, help="Training steps.")] = 10,
    *,
    size: SizeOptions,
    as_json: AsJson = False,
) -> None:
    """Train a smaller model with a recipe's parallel layout on CPUs, and compare the losses with those of one rank.

    NAME is a recipe, a Python file with recipe() from `recipes export`, or one of NeMo's own recipes: nemo:llama3_8b.
    """
    import shutil
    import tempfile

    from superpod.collection import installed

    request = _check_request(name, overrides, size)
    if not _child_folder:  # in a child process, the parent has checked it
        installed.require("rehearsing a recipe")
    if subject.subject_kind(name) == "file" and not _child_folder:
        raise typer.Exit(_rehearse_in_child(name))
    from superpod.rehearsal import rehearsal_run

    rehearsal = _plan(request, ranks)
    _create_marker("planned")
    _require_memory(rehearsal.shrunk.job.gpus)
    if not as_json:
        print(_describe_plan(rehearsal))
    folder = Path(tempfile.mkdtemp(prefix="recipes-rehearse-"))
    try:
        _run(rehearsal, folder, steps)
    finally:
        if rehearsal.passed:
            shutil.rmtree(folder, ignore_errors=True)
    if as_json:
        print(json.dumps(rehearsal_run.to_json(rehearsal), indent=1), flush=True)
    else:
        print(_describe_result(rehearsal), flush=True)
    if not rehearsal.passed:
        if not as_json:
            print(f"logs of all ranks: {folder}")
        raise typer.Exit(1)


def _check_request(name: str, overrides: list[str] | None, size: SizeOptions) -> Request:
    """Return the request for a recipe or a file after the checks that need no NeMo. Raises UserError if one fails."""
    if subject.subject_kind(name) == "recipe":
        return make_request(name, overrides, None, size)
    if size.layout is not None:
        raise UserError(f"--layout applies only to recipes; {name} sets its own", "use trainer.strategy.* overrides")
    request = size.request(name, overrides)
    request.check(any_subject=True)
    return request


def _rehearse_in_child(name: str) -> int:
    """Rehearse the user's file `name` in a child process with the arguments of this one, and return its exit code.

    Raises:
        UserError: the file exceeds the time limit, or ends the process before the rehearsal is complete.
    """
    import subprocess
    import sys
    import tempfile

    from superpod.launch import redacted_output

    with tempfile.TemporaryDirectory(prefix="recipes-rehearse-") as folder:
        # -P: do not import packages, such as a folder called nemo, from the current folder.
        options = ["-P", "-W", "ignore", "-c", CHILD_CODE, folder]
        command = [sys.executable, *options, *sys.argv[1:]]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
        with redacted_output.forward_output(process):
            try:
                code = _wait(process, Path(folder))
            finally:
                process.kill()
                process.wait()
        if code is None:
            raise UserError(f"{name}: recipe() did not return within {LIMIT_S} s", "check why it blocks")
        if not Path(folder, "ended").exists():
            raise UserError(
                f"{name}: exited with code {code} before the rehearsal was complete", "see the output above"
            )
    return code


def _wait(process: subprocess.Popen[str], folder: Path) -> int | None:
    """Wait for the child process and return its exit code; None if it exceeds the time limit for planning."""
    import subprocess

    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return process.wait() if Path(folder, "planned").exists() else None


def run_as_child(main: Callable[[], None]) -> None:
    """Run `main` in the child process; the first command-line argument is the folder for marker files."""
    import sys

    from superpod.common.parent_death import end_with_parent

    end_with_parent()
    _child_folder.append(Path(sys.argv.pop(1)))
    try:
        main()
    except SystemExit:
        _create_marker("ended")  # not reached if the user's file calls os._exit
        raise
    _create_marker("ended")


def _create_marker(name: str) -> None:
    """Create a marker file for the parent process; do nothing outside a child process."""
    for folder in _child_folder:
        folder.joinpath(name).touch()


def _plan(request: Request, ranks: int) -> Rehearsal:
    """Plan a rehearsal on at most `ranks` processes, with a progress message if NeMo must be imported."""
    from superpod.launch.display.progress_bar import quiet_spinner
    from superpod.rehearsal import rehearsal_run

    if not request.overrides and subject.subject_kind(request.recipe) == "recipe":
        return rehearsal_run.plan_rehearsal(request, ranks)
    with quiet_spinner("importing NeMo and shrinking the recipe (10 to 30 s)"):
        return rehearsal_run.plan_rehearsal(request, ranks)


def _run(rehearsal: Rehearsal, folder: Path, steps: int) -> None:
    """Train and check a rehearsal with progress messages; write the logs of libraries to a file in `folder`."""
    import os

    from superpod.common.quiet import silence_libraries
    from superpod.rehearsal import rehearsal_run

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a rehearsal runs on CPUs even if the machine has GPUs
    with silence_libraries(folder / "rehearse.log") as terminal:
        console = tables.console(terminal)
        rehearsal_run.run_rehearsal(rehearsal, folder, steps, note=lambda phase: console.print(f"[dim]{phase} ...[/]"))


def _require_memory(ranks: int) -> None:
    """Raise UserError if the ranks do not fit in memory. Forked ranks share NeMo's pages: each needs under 0.8 GB."""
    from superpod.rehearsal.training.forked_run import RANK_GIB, available_gib

    need, have = 1.0 + ranks * RANK_GIB, available_gib()
    if need > have:
        raise UserError(
            f"{counted(ranks, 'rank')} would need about {need:.1f} GiB of memory, but {have:.1f} GiB are free",
            f"use --ranks {max(1, ranks // 2)}",
        )


def _describe_plan(rehearsal: Rehearsal) -> str:
    """Return the size, the number of ranks, the topology and the reduced model sizes of a rehearsal as text."""
    size, ranks = counted(rehearsal.nodes, "node"), counted(rehearsal.shrunk.job.gpus, "CPU rank")
    lines = [f"{rehearsal.recipe} at {size} on {ranks}: {rehearsal.shrunk.topology}", "reduced:"]
    lines += [f"  {size.name} {size.old} -> {size.new}" for size in rehearsal.shrunk.sizes]
    return "\n".join([*lines, "data: mock data, random tokens"])


def _describe_result(rehearsal: Rehearsal) -> str:
    """Return the changed settings, the results of the checks and the times of a rehearsal as text."""
    from superpod.rehearsal.rehearsal_run import CANNOT_SHOW

    lines = ["changed:"]
    lines += [f"  {change.path or 'recipe'}: {change.new}  ({change.reason})" for change in rehearsal.changes]
    dropped_settings = ", ".join(f"{name}={value}" for name, value in rehearsal.dropped.items())
    lines += [f"GPU-only settings disabled: {dropped_settings or 'none'}", ""]
    lines += [f"{'pass' if check.passed else 'FAIL'}  {check.name}: {check.message}" for check in rehearsal.checks]
    times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in rehearsal.seconds.items())
    lines += [f"time: {times}", f"a rehearsal cannot show: {CANNOT_SHOW}", "passed" if rehearsal.passed else "failed"]
    return "\n".join(lines)
