"""Run an attempt on this machine and show its progress, for `recipes run` and `recipes finetune`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError
from superpod.launch.display.consoles import print_plain
from superpod.launch.model_check import require_built

if TYPE_CHECKING:
    from rich.console import Console

    from superpod.launch.local import AttemptEnd, LocalRun
    from superpod.requests.request import Request
    from superpod.runtime.runs.run_folder import Attempt, RunFolder

STYLES = {"done": "green", "cancelled": "yellow"}


def build_and_train(
    request: Request, folder: RunFolder | None, runs: Path, *, build: bool
) -> tuple[AttemptEnd, RunFolder]:
    """Build the configuration of a request and run one attempt, like `train`. `build` is False with `--no-build`."""
    from superpod.common.quiet import silence_libraries
    from superpod.launch import local
    from superpod.launch.display import consoles
    from superpod.launch.display.progress_bar import exit_on_interrupt, spinner

    with silence_libraries() as terminal:
        console = consoles.console(terminal, highlight=True)
        with spinner(console, "importing NeMo and building the recipe (10 to 20 s)"), exit_on_interrupt(console):
            local_run = local.prepare(request)
        require_built([local_run.resolved], build=build, console=console)
        return train(console, local_run, folder, runs)


def train(console: Console, local_run: LocalRun, folder: RunFolder | None, runs: Path) -> tuple[AttemptEnd, RunFolder]:
    """Run one attempt of the run `folder`, or of a new run in `runs`; return the end of the attempt, and the run."""
    from superpod.launch import preflight
    from superpod.runtime.runs.run_folder import RunFolder

    if folder is None:
        # Before the run folder is created, which would appear to be queued without an attempt.
        preflight.require_disk_space(runs, local_run.checkpoint_bytes)
    facts, lines = _facts(local_run), local_run.lines
    folder = folder or RunFolder.create(runs, local_run.resolved.request.recipe, facts=facts, recipe_lines=lines)
    with folder.lock():
        return train_locked(console, local_run, folder), folder


def _facts(local_run: LocalRun) -> dict[str, Any]:
    """Return the entries of run.json for a local run."""
    return {
        **local_run.resolved.request.facts(),
        **local_run.facts,
        "checkpoint_bytes": local_run.checkpoint_bytes,
        "save_every": local_run.resolved.save_every,
        "max_steps": local_run.max_steps,
        "nodes": 1,
        "gpus_per_node": local_run.ranks,
    }


def train_locked(
    console: Console, local_run: LocalRun, folder: RunFolder, attempt: Attempt | None = None
) -> AttemptEnd:
    """Run the open `attempt` of a run, or a new one, and return its end. This process must hold the run's lock."""
    from superpod.launch import local, preflight
    from superpod.launch.display.progress_bar import StepProgress
    from superpod.runtime.checkpoints import resume
    from superpod.runtime.processes.attempt_processes import refuse_running
    from superpod.runtime.runs import pending_facts
    from superpod.runtime.runs.run_state import State

    refuse_running(folder.path)
    preflight.require_disk_space(folder.path, local_run.checkpoint_bytes)
    decision = local.decide_resume(local_run, folder)
    marker = folder.reopen(local_run.max_steps)
    folder.write_plan(local_run.resolved.plan)
    attempt = attempt or folder.new_attempt()
    resume.apply_decision(folder, attempt, decision)
    attempt.write_env(os.environ)
    pending_facts.store(attempt, _facts(local_run), local_run.lines)
    _announce(console, local_run, folder, attempt, decision.message if folder.attempts[1:] else "")
    end = local.AttemptEnd(State.FAILED, 1, "the launcher failed")
    steps = StepProgress(console, folder, local_run.max_steps)
    try:
        with steps:
            end = local.launch(local_run, folder, attempt, steps.tick)
    finally:
        has_new_steps = steps.last > steps.first
        with _report_write_errors(console):
            if has_new_steps:
                pending_facts.apply(folder)
            elif marker:
                folder.restore_done(marker)
        with _report_write_errors(console):
            extra = {}
            if marker and not has_new_steps:  # the run is still done, although this attempt failed
                extra["was_done"] = marker.get("step")
            pending_facts.discard(attempt)
            attempt.finish(end.state, exit_code=end.exit_code, message=end.message, last_step=steps.last, **extra)
    style = STYLES.get(end.state, "red")
    console.print(f"[{style}]{end.state}[/] at step {steps.last} of {local_run.max_steps}")
    if end.message:
        print_plain(console, end.message)
    return end


@contextmanager
def _report_write_errors(console: Console) -> Iterator[None]:
    """Print write errors and continue, so that the outcome is reported even if the disk is full."""
    try:
        yield
    except UserError as error:
        print_plain(console, str(error))


def _announce(console: Console, local_run: LocalRun, folder: RunFolder, attempt: Attempt, resume_message: str) -> None:
    """Print the run folder, the changes for a rehearsal, and if it is not empty, the message about the checkpoint."""
    if local_run.changes:
        changes = "".join(f"{c.path or 'recipe'}: {c.old} -> {c.new}  ({c.reason})\n" for c in local_run.changes)
        (attempt.path / "rehearsal.txt").write_text(changes, encoding="utf-8")
        console.print(
            f"no GPU here: rehearsing on {local_run.ranks} CPU ranks with NeMo and Megatron-Core over gloo; "
            f"{len(local_run.changes)} GPU settings changed, listed in attempts/{attempt.name}/rehearsal.txt"
        )
    print_plain(console, f"run folder {folder.path}, attempt {attempt.name}")
    if resume_message:
        print_plain(console, resume_message)
