"""`recipes rehearse`: train a shrunk version of a recipe on CPUs, in its own parallel layout, and check the result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from superpod.cli.options.request_options import AsJson, Name, Overrides, make_request
from superpod.cli.options.size_options import SizeOptions, with_size
from superpod.errors import UserError, counted

if TYPE_CHECKING:
    import subprocess

    from superpod.rehearsal.rehearsal_run import Rehearsal
    from superpod.requests.request import Request

MIN_STEPS, MAX_STEPS = 4, 1000
LIMIT_S = 900
"""Time limit for planning a user's file in seconds, including the import of NeMo."""
CHILD_CODE = "from superpod.cli import main; from superpod.cli.running import rehearse; rehearse.run_as_child(main)"
_child_folder: list[Path] = []
"""In the child process that rehearses a user's file, the folder for the markers that the parent reads; else empty."""


@with_size
def rehearse(
    name: Name,
    overrides: Overrides = None,
    ranks: Annotated[
        int, typer.Option(min=1, max=1024, help="Maximum number of processes; a larger layout is reduced.")
    ] = 12,
    steps: Annotated[int, typer.Option(min=MIN_STEPS, max=MAX_STEPS, help="Training steps.")] = 10,
    *,
    size: SizeOptions,
    as_json: AsJson = False,
) -> None:
    """Dry run on CPUs: train a shrunk version of a recipe in its own parallel layout; compare it with a single rank.

    NAME is a recipe, a Python file with recipe() from `recipes export`, or one of NeMo's own recipes: nemo:llama3_8b.
    """
    import shutil
    import tempfile

    from superpod.collection import installed
    from superpod.requests import subject

    request = _check_request(name, overrides, size)
    if not _child_folder:  # otherwise the parent process has checked it
        installed.require("rehearsing a recipe")
    if subject.subject_kind(name) == "file" and not _child_folder:
        raise typer.Exit(_rehearse_in_child(name))
    from superpod.rehearsal import rehearsal_run

    rehearsal = _plan(request, ranks)
    _mark("planned")
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
    """Return the request, checked without NeMo."""
    from superpod.requests import subject

    if subject.subject_kind(name) == "recipe":
        return make_request(name, overrides, None, size)
    if size.layout is not None:
        raise UserError(f"--layout applies only to recipes; {name} sets its own", "use trainer.strategy.* overrides")
    request = size.request(name, overrides)
    request.check(any_subject=True)
    return request


def _rehearse_in_child(name: str) -> int:
    """Rehearse a user's file in a child process with the same arguments; return its exit code.

    Raises:
        UserError: the file hangs, or terminates the process before the rehearsal ends.
    """
    import subprocess
    import sys
    import tempfile

    from superpod.launch import redacted_output

    with tempfile.TemporaryDirectory(prefix="recipes-rehearse-") as folder:
        # -P: do not import a folder called nemo in the current folder.
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
            raise UserError(f"{name}: recipe() did not return within {LIMIT_S} s", "check that it does not block")
        if not Path(folder, "ended").exists():
            raise UserError(
                f"{name}: its process exited with code {code} before the rehearsal ended", "see the output above"
            )
    return code


def _wait(process: subprocess.Popen[str], folder: Path) -> int | None:
    """Return the exit code of the child; None if planning the file exceeds the time limit."""
    import subprocess

    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return process.wait() if Path(folder, "planned").exists() else None


def run_as_child(main: Callable[[], None]) -> None:
    """Run the command in the child process; its first argument is the folder for the markers."""
    import sys

    from superpod.common.parent_death import end_with_parent

    end_with_parent()
    _child_folder.append(Path(sys.argv.pop(1)))
    try:
        main()
    except SystemExit:
        _mark("ended")  # not reached if the user's file calls os._exit
        raise
    _mark("ended")


def _mark(name: str) -> None:
    for folder in _child_folder:
        folder.joinpath(name).touch()


def _plan(request: Request, ranks: int) -> Rehearsal:
    from superpod.launch.display.progress_bar import quiet_spinner
    from superpod.rehearsal import rehearsal_run
    from superpod.requests import subject

    if not request.overrides and subject.subject_kind(request.recipe) == "recipe":
        return rehearsal_run.plan_rehearsal(request, ranks)
    with quiet_spinner("importing NeMo and shrinking the recipe (10 to 30 s)"):
        return rehearsal_run.plan_rehearsal(request, ranks)


def _run(rehearsal: Rehearsal, folder: Path, steps: int) -> None:
    import os

    from superpod.cli import tables
    from superpod.common.quiet import silence_libraries
    from superpod.rehearsal import rehearsal_run

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a rehearsal runs on CPUs even if the machine has GPUs
    with silence_libraries(folder / "rehearse.log") as terminal:
        console = tables.console(terminal)
        rehearsal_run.run_rehearsal(rehearsal, folder, steps, note=lambda what: console.print(f"[dim]{what} ...[/]"))


def _require_memory(ranks: int) -> None:
    """Refuse more ranks than fit in memory. Forked ranks share the pages of NeMo, so each needs less than 0.8 GB."""
    from superpod.rehearsal.training.forked_run import RANK_GIB, available_gib

    need, have = 1.0 + ranks * RANK_GIB, available_gib()
    if need > have:
        raise UserError(
            f"{ranks} ranks need about {need:.1f} GiB of memory, but {have:.1f} GiB are free",
            f"try --ranks {max(1, ranks // 2)}",
        )


def _describe_plan(rehearsal: Rehearsal) -> str:
    size, ranks = counted(rehearsal.nodes, "node"), counted(rehearsal.shrunk.job.gpus, "CPU rank")
    lines = [
        f"{rehearsal.recipe} at {size} on {ranks}: {rehearsal.shrunk.topology}",
        "shrunk:",
    ]
    lines += [f"  {size.name} {size.old} -> {size.new}" for size in rehearsal.shrunk.sizes]
    return "\n".join([*lines, "data: mock data, random tokens"])


def _describe_result(rehearsal: Rehearsal) -> str:
    from superpod.rehearsal.rehearsal_run import CANNOT_SHOW

    lines = ["changed:"]
    lines += [f"  {change.path or 'recipe'}: {change.new}  ({change.reason})" for change in rehearsal.changes]
    dropped_settings = ", ".join(f"{name}={value}" for name, value in rehearsal.dropped.items())
    lines += [f"GPU-only settings disabled: {dropped_settings or 'none'}", ""]
    lines += [f"{'pass' if check.passed else 'FAIL'}  {check.name}: {check.message}" for check in rehearsal.checks]
    times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in rehearsal.seconds.items())
    lines += [f"time: {times}", f"a rehearsal cannot show: {CANNOT_SHOW}", "passed" if rehearsal.passed else "failed"]
    return "\n".join(lines)
