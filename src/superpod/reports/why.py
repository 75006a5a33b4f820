"""Why runs failed, of run folders, logs and folders of logs; with what the planner knows of a run's memory."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from superpod.common import walk
from superpod.diagnosis import oom
from superpod.diagnosis.flight_recorder import is_dump
from superpod.diagnosis.log_lines import is_text
from superpod.diagnosis.verdict import FAILED, HEALTHY, NO_FAILURE, Finding, Verdict
from superpod.errors import UserError
from superpod.runtime.attempts import diagnose
from superpod.runtime.runs.run_folder import Attempt, RunFolder
from superpod.runtime.runs.run_state import State

LOG_NAMES = (".log", ".out", ".err", ".txt", ".stdout", ".stderr", ".gz", ".xz", ".bz2")
MOST_FILES = 20_000
SKIPPED = ("checkpoints", "tb_logs", "wandb", ".git", "__pycache__", "site-packages")
"""Folders below a folder of logs that hold none."""
OF_MEMORY = ("gpu_out_of_memory", "gpu_memory_fragmented", "gpu_memory_taken")


@dataclass(frozen=True)
class Diagnosis:
    """The verdict on one run or one set of logs."""

    subject: str
    verdict: Verdict
    attempt: str = ""


def diagnose_paths(paths: Sequence[Path], attempt: str = "") -> list[Diagnosis]:
    """A verdict for each run folder, and one for all logs together, which are taken as one run's.

    Raises:
        UserError: a path is missing, a folder holds no log, or a run has no attempt of that name.
    """
    runs = [path for path in paths if is_run(path)]
    logs = [path for path in paths if not is_run(path)]
    if attempt and not runs:
        raise UserError("--attempt is for run folders", "leave it out for logs")
    verdict = [diagnose_run(RunFolder.open(path), attempt) for path in runs]
    return verdict + ([diagnose_logs(logs)] if logs else [])


def is_run(path: Path) -> bool:
    """Whether a path is a run folder."""
    return path.is_dir() and (path / "run.json").is_file()


def diagnose_logs(paths: Sequence[Path]) -> Diagnosis:
    """The verdict on logs and folders of logs, all of one run. Raises UserError."""
    base = paths[0] if len(paths) == 1 and paths[0].is_dir() else None
    try:
        files = [file for path in paths for file in _files(path)]
        return Diagnosis(" ".join(map(str, paths)), diagnose.verdict_of_files(files, base))
    except OSError as error:
        raise UserError(f"{error.filename or paths[0]}: {error.strerror}", "name a log that you may read") from error


def _files(path: Path) -> list[Path]:
    if path.is_file():
        if not is_dump(path) and not is_text(path):
            raise UserError(f"{path} is no log: it holds no text", "name a run, a log file, or a folder of logs")
        return [path]
    if not path.is_dir():
        raise UserError(f"{path} is neither a run folder nor a log", "name a run, a log file, or a folder of logs")
    files = []
    for file in walk.below(path, SKIPPED):
        if not _is_log(file):
            continue
        files.append(file)
        if len(files) > MOST_FILES:
            raise UserError(f"{path} has more than {MOST_FILES:,} files", "name the folder of one run's logs")
    if not files:
        raise UserError(f"{path} holds no log ({', '.join(LOG_NAMES)}) and no run.json", "name a run or a log file")
    return sorted(files)


def _is_log(path: Path) -> bool:
    """Whether a file that was found is a log or a dump. One that was removed since is none."""
    if path.suffix.lower() not in LOG_NAMES and path.name not in ("stdout", "stderr"):
        return is_dump(path)
    try:
        return is_text(path) or is_dump(path)
    except FileNotFoundError:
        return False


def diagnose_run(run: RunFolder, attempt: str = "") -> Diagnosis:
    """The verdict on an attempt of a run, the newest unless one is named. Raises UserError."""
    attempts = run.attempts
    names = [known.name for known in attempts]
    if attempt and attempt.zfill(3) not in names:
        raise UserError(f"{run.path} has no attempt {attempt}", f"it has {', '.join(names) or 'none yet'}")
    if not attempts:
        outputs = [path for path in sorted(run.path.glob("slurm-*.out")) if os.path.getsize(path)]
        verdict = (
            diagnose.verdict_of_files(outputs, run.path) if outputs else Verdict(NO_FAILURE, words="no attempt yet")
        )
        return Diagnosis(str(run.path), verdict)
    chosen = attempts[names.index(attempt.zfill(3))] if attempt else attempts[-1]
    verdict = diagnose.verdict(run, chosen)
    if run.done and chosen is attempts[-1]:
        state = HEALTHY if verdict.state == NO_FAILURE else verdict.state
        verdict = replace(
            verdict, state=state, words=f"the run is done; {verdict.words}" if verdict.words else "the run is done"
        )
    elif verdict.state in (HEALTHY, NO_FAILURE):
        status = run.status()
        if status.state in (State.FAILED, State.STALLED, State.CANCELLED):
            verdict = replace(verdict, words=f"its logs name no cause; the run is {status.state}: {status.message}")
    verdict = replace(verdict, notes=(*verdict.notes, *_earlier(attempts, chosen)))
    verdict = _of_its_launcher(verdict, run, chosen)
    return Diagnosis(str(run.path), _with_plan(verdict, run, chosen), chosen.name)


def _of_its_launcher(verdict: Verdict, run: RunFolder, attempt: Attempt) -> Verdict:
    """The verdict without Slurm's commands, where the attempt was no job of it."""
    root = verdict.root
    if root is None or root.name != "cancelled" or attempt.result.get("job"):
        return verdict
    fix = f"`{shlex.join(['recipes', 'run', run.recipe, '--resume', str(run.path)])}` goes on"
    return replace(verdict, root=replace(root, means="somebody ended the run, such as with Ctrl-C", fix=fix))


def _earlier(attempts: Sequence[Attempt], chosen: Attempt) -> list[str]:
    """How the attempts before ended, in a line each."""
    before = [attempt for attempt in attempts if int(attempt.name) < int(chosen.name)][-5:]
    ends = [(attempt.name, attempt.result) for attempt in before]
    return [
        f"attempt {name} before it: {result.get('state', '?')}"
        + (f", {message}" if (message := result.get("message")) else "")
        for name, result in ends
    ]


def _with_plan(verdict: Verdict, run: RunFolder, attempt: Attempt) -> Verdict:
    """The verdict with planned memory beside actual, and the planner's cheapest way out, where the GPU's ran out."""
    if verdict.state != FAILED or verdict.root is None or verdict.root.name not in OF_MEMORY:
        return verdict
    try:
        words, fix = _planned_words(run, verdict.root, attempt)
    except UserError as error:
        words, fix = f"not compared with a plan: {error}", ""
    root = replace(
        verdict.root, detail="; ".join(filter(None, [verdict.root.detail, words])), fix=fix or verdict.root.fix
    )
    return replace(verdict, root=root)


def _planned_words(run: RunFolder, root: Finding, attempt: Attempt) -> tuple[str, str]:
    """`planned: 63.5 GiB reserved ...`, and what frees enough. Raises UserError."""
    from superpod.planner import explain, predict
    from superpod.reports.runs.run_plan import planned_job

    job = planned_job(run)
    prediction = predict.one(job)
    reserved, limit = prediction.reserved_gib_max or 0.0, prediction.limit_gib
    words = f"planned: {reserved:.1f} GiB reserved at most of {limit:.1f} usable on {job.node.name}"
    figures = next((f for e in root.evidence if (f := oom.parse(e.text))), None)
    if root.ranks:
        stage = root.ranks[0] * job.layout.pp // max(job.gpus, 1)
        words += f", and rank {root.ranks[0]} is on pipeline stage {stage} of {job.layout.pp}"
    peak = attempt.heartbeat(root.ranks[0] if root.ranks else 0).get("allocated_gib")
    if figures and figures.allocated is not None:
        words += f"; actual: {figures.allocated / oom.GIB:.1f} GiB allocated when it failed"
    elif isinstance(peak, (int, float)):
        words += f"; actual: {peak:.1f} GiB allocated before"
    if root.name != "gpu_out_of_memory":
        return words, ""
    moves = explain.memory_savings(job, prediction)
    short = (figures.short or 0.0) / oom.GIB if figures else 0.0
    enough = [m for m in moves if m.frees_gib > max(short, prediction.short_gib)][:3]
    if not enough:
        return words, "no single change of the layout frees enough: take more GPUs (`recipes fit`, `recipes plan`)"
    listed = ", ".join(f"{m.what} frees {m.frees_gib:.1f} GiB ({m.slower:+.0%} time)" for m in enough)
    plan = f"`recipes plan {job.model.name} --gpu {job.node.name} --gpus {job.gpus}`"
    return words, f"{listed}; then a new run of that layout, or {plan}"
