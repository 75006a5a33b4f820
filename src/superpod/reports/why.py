"""Diagnosis of failed runs from run folders and logs. Out-of-memory errors are compared with the plan."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from superpod.diagnosis import oom
from superpod.diagnosis.flight_recorder import is_dump
from superpod.diagnosis.log_lines import is_text
from superpod.diagnosis.verdict import FAILED, HEALTHY, NO_FAILURE, Finding, Verdict
from superpod.errors import UserError
from superpod.reports.external import log_folder
from superpod.runtime.attempts import diagnose
from superpod.runtime.runs.run_folder import Attempt, RunFolder
from superpod.runtime.runs.run_state import State

LOG_NAMES = (".log", ".out", ".err", ".txt", ".stdout", ".stderr", ".gz", ".xz", ".bz2")
MAX_FILES = 20_000
SKIPPED_FOLDERS = ("checkpoints", "tb_logs", "wandb", ".git", "__pycache__", "site-packages")
"""Names of folders that contain no logs."""
MEMORY_CAUSES = ("gpu_out_of_memory", "gpu_memory_fragmented", "gpu_memory_taken")
EARLIER_ATTEMPTS = 5
"""Number of listed attempts before the diagnosed one."""


@dataclass(frozen=True)
class Diagnosis:
    """The verdict on one run or one set of logs."""

    subject: str
    verdict: Verdict
    attempt: str = ""


def diagnose_paths(paths: Sequence[Path], attempt: str = "") -> list[Diagnosis]:
    """Diagnose each run folder separately, and all other paths together as the logs of one run.

    `attempt` selects an attempt of the runs; "" for the latest.

    Raises:
        UserError: a path does not exist, a folder contains no log, or a run has no attempt of that name.
    """
    runs = [path for path in paths if is_run_folder(path)]
    logs = [path for path in paths if not is_run_folder(path)]
    if attempt and not runs:
        raise UserError("--attempt applies only to run folders", "omit it for logs")
    diagnoses = [diagnose_run(RunFolder.open(path), attempt) for path in runs]
    if logs:
        diagnoses.append(diagnose_logs(logs))
    return diagnoses


def is_run_folder(path: Path) -> bool:
    """Return whether a path is a folder with run.json."""
    return path.is_dir() and (path / "run.json").is_file()


def diagnose_logs(paths: Sequence[Path]) -> Diagnosis:
    """Diagnose the logs, and folders of logs, of one run. Raises UserError if there is no readable log."""
    base = paths[0] if len(paths) == 1 and paths[0].is_dir() else None
    try:
        files = [file for path in paths for file in _find_logs(path)]
        return Diagnosis(" ".join(map(str, paths)), diagnose.judge_files(files, base))
    except OSError as error:
        raise UserError(
            f"{error.filename or paths[0]}: {error.strerror}", "specify a log that you have permission to read"
        ) from error


def _find_logs(path: Path) -> list[Path]:
    """Return a log file, or the sorted logs in a folder. Raises UserError if there are none, or too many."""
    if path.is_file():
        if not is_dump(path) and not is_text(path):
            raise UserError(f"{path} is not a log: it is not text", "specify a run, a log file, or a folder of logs")
        return [path]
    if not path.is_dir():
        raise UserError(f"{path} is neither a run folder nor a log", "specify a run, a log file, or a folder of logs")
    files = []
    for file in log_folder.iterate_files(path, SKIPPED_FOLDERS):
        if not _is_log(file):
            continue
        files.append(file)
        if len(files) > MAX_FILES:
            raise UserError(f"{path} has more than {MAX_FILES:,} files", "specify the folder with the logs of one run")
    if not files:
        names = ", ".join(LOG_NAMES)
        raise UserError(f"{path} contains no log ({names}) and no run.json", "specify a run or a log file")
    return sorted(files)


def _is_log(path: Path) -> bool:
    """Return whether a file is a log or a flight recorder dump; False if it was removed in the meantime."""
    if path.suffix.lower() not in LOG_NAMES and path.name not in ("stdout", "stderr"):
        return is_dump(path)
    try:
        return is_text(path) or is_dump(path)
    except FileNotFoundError:
        return False


def diagnose_run(run: RunFolder, attempt: str = "") -> Diagnosis:
    """Diagnose an attempt of a run, by default the latest. Raises UserError if there is no such attempt."""
    attempts = run.attempts
    names = [known.name for known in attempts]
    if attempt and attempt.zfill(3) not in names:
        raise UserError(f"{run.path} has no attempt {attempt}", f"its attempts: {', '.join(names) or 'none yet'}")
    if not attempts:
        return Diagnosis(str(run.path), _diagnose_job_outputs(run))

    chosen_attempt = attempts[names.index(attempt.zfill(3))] if attempt else attempts[-1]
    verdict = diagnose.judge_attempt(run, chosen_attempt)
    if run.done and chosen_attempt is attempts[-1]:
        state = HEALTHY if verdict.state == NO_FAILURE else verdict.state
        words = f"the run is done; {verdict.words}" if verdict.words else "the run is done"
        verdict = replace(verdict, state=state, words=words)
    elif verdict.state in (HEALTHY, NO_FAILURE):
        status = run.status()
        if status.state in (State.FAILED, State.STALLED, State.CANCELLED):
            verdict = replace(verdict, words=f"the logs contain no cause; the run is {status.state}: {status.message}")
    verdict = replace(verdict, notes=(*verdict.notes, *_describe_earlier(attempts, chosen_attempt)))
    verdict = _adapt_to_launcher(verdict, run, chosen_attempt)
    return Diagnosis(str(run.path), _add_planned_memory(verdict, run, chosen_attempt), chosen_attempt.name)


def _diagnose_job_outputs(run: RunFolder) -> Verdict:
    """Return the verdict on a run without attempts, from the output of its Slurm jobs."""
    outputs = [path for path in sorted(run.path.glob("slurm-*.out")) if os.path.getsize(path)]
    if outputs:
        return diagnose.judge_files(outputs, run.path)
    return Verdict(NO_FAILURE, words="no attempt yet")


def _adapt_to_launcher(verdict: Verdict, run: RunFolder, attempt: Attempt) -> Verdict:
    """Return the verdict with a cancellation outside Slurm explained as an interrupt by the user, not as scancel."""
    root = verdict.root
    if root is None or root.name != "cancelled" or attempt.result.get("job"):
        return verdict
    command = shlex.join(["recipes", "run", run.recipe, "--resume", str(run.path)])
    means = "somebody ended the run, for example with Ctrl-C"
    return replace(verdict, root=replace(root, means=means, fix=f"`{command}` resumes it"))


def _describe_earlier(attempts: Sequence[Attempt], shown_attempt: Attempt) -> list[str]:
    """Return a line with the final state of each of the last attempts before `shown_attempt`."""
    earlier_attempts = [attempt for attempt in attempts if int(attempt.name) < int(shown_attempt.name)]
    lines = []
    for attempt in earlier_attempts[-EARLIER_ATTEMPTS:]:
        line = f"earlier attempt {attempt.name}: {attempt.result.get('state', '?')}"
        message = attempt.result.get("message")
        lines.append(f"{line}, {message}" if message else line)
    return lines


def _add_planned_memory(verdict: Verdict, run: RunFolder, attempt: Attempt) -> Verdict:
    """Return the verdict; after a GPU out-of-memory error, with planned and actual memory, and changes that help."""
    if verdict.state != FAILED or verdict.root is None or verdict.root.name not in MEMORY_CAUSES:
        return verdict
    try:
        comparison, fix = _compare_with_plan(run, verdict.root, attempt)
    except UserError as error:
        comparison, fix = f"not compared with a plan: {error}", ""
    detail = "; ".join(text for text in (verdict.root.detail, comparison) if text)
    return replace(verdict, root=replace(verdict.root, detail=detail, fix=fix or verdict.root.fix))


def _compare_with_plan(run: RunFolder, root: Finding, attempt: Attempt) -> tuple[str, str]:
    """Return a text such as `planned: at most 63.5 GiB reserved ...`, and changes that free enough memory."""
    from superpod.planner import predict, suggestions
    from superpod.reports.runs.run_plan import planned_job

    job = planned_job(run)
    prediction = predict.one(job)
    reserved, limit = prediction.reserved_gib_max or 0.0, prediction.limit_gib
    text = f"planned: at most {reserved:.1f} GiB reserved of {limit:.1f} usable on {job.node.name}"
    parsed_errors = [oom.parse(evidence.text) for evidence in root.evidence]
    figures = next((one for one in parsed_errors if one), None)
    if root.ranks:
        stage = root.ranks[0] * job.layout.pp // max(job.gpus, 1)
        text += f", and rank {root.ranks[0]} is on pipeline stage {stage} of {job.layout.pp}"
    peak_gib = attempt.heartbeat(root.ranks[0] if root.ranks else 0).get("allocated_gib")
    if figures and figures.allocated is not None:
        text += f"; actual: {figures.allocated / oom.GIB:.1f} GiB allocated when it failed"
    elif isinstance(peak_gib, (int, float)):
        text += f"; actual: {peak_gib:.1f} GiB allocated before the failure"
    if root.name != "gpu_out_of_memory":
        return text, ""

    missing_gib = (figures.shortage or 0.0) / oom.GIB if figures else 0.0
    missing_gib = max(missing_gib, prediction.short_gib)
    changes = [change for change in suggestions.memory_savings(job, prediction) if change.frees_gib > missing_gib][:3]
    if not changes:
        return text, "no single change to the layout frees enough memory: use more GPUs (`recipes fit`, `recipes plan`)"
    listed_changes = ", ".join(
        f"{change.what} frees {change.frees_gib:.1f} GiB ({change.slower:+.0%} time)" for change in changes
    )
    plan = f"`recipes plan {job.model.name} --gpu {job.node.name} --gpus {job.gpus}`"
    return text, f"{listed_changes}; start a new run with one of these changes, or with a layout from {plan}"
