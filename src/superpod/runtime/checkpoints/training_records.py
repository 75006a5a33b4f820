"""Find evidence of trained steps in a run folder, so that no trained run silently restarts at step 1.

Standard library only.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from superpod.common.json_files import is_number, read_json, write_json
from superpod.errors import UserError
from superpod.runtime.checkpoints.checkpoint_folder import MARK
from superpod.runtime.runs.run_facts import METRICS, read_metrics
from superpod.runtime.runs.run_folder import Attempt, RunFolder, as_user_errors

RESET = "reset.json"
"""`RUN/reset.json`: `{"after": N}`, the number of the last attempt before `recipes ckpt reset`."""

MOVED = (METRICS, "saved.jsonl", "checkpoints")
"""Files that a reset renames, for example to `metrics-until-003.jsonl`."""


@dataclass(frozen=True)
class Record:
    """Evidence in a file that a run has been trained up to a step."""

    step: int
    source: str
    """the file, relative to the run folder"""
    is_saved: bool = False
    """whether it shows that a checkpoint of this step or an earlier one was saved"""
    is_of_unknown_attempt: bool = False


def attempts_since_reset(run: RunFolder) -> list[Attempt]:
    """Return the attempts since the last `recipes ckpt reset`, or all attempts if there was none."""
    reset_attempt = (read_json(run.path / RESET) or {}).get("after")
    first = int(reset_attempt) + 1 if is_number(reset_attempt) else 1
    return [attempt for attempt in run.attempts if int(attempt.name) >= first]


def lost_training(run: RunFolder) -> str:
    """Describe the saved training that a start at step 1 would discard; '' if there is none.

    Steps before the first checkpoint may be trained again: no checkpoint is complete before `save_every` steps, or
    twice as many if the first save still exists and is marked as unfinished. Any other evidence of a trained step means
    that checkpoints have disappeared. Raises OSError.
    """
    records = _records(run)
    if not records:
        return ""
    newest_record = max(records, key=lambda record: record.step)
    is_certain = any(record.is_saved or record.is_of_unknown_attempt for record in records)
    if not is_certain and newest_record.step < _first_complete_save(run):
        return ""
    saved_record = max((record for record in records if record.is_saved), key=lambda record: record.step, default=None)
    message = f"{newest_record.source} records training up to step {newest_record.step}"
    if saved_record and saved_record.source != newest_record.source:
        message += f", and {saved_record.source} a checkpoint"
    return message


def _first_complete_save(run: RunFolder) -> float:
    """Return the number of steps after which a complete checkpoint must exist; 0 if `save_every` is unknown."""
    save_every = run.facts.get("save_every")
    if not is_number(save_every) or save_every <= 0:
        return 0
    has_unfinished_save = any(run.checkpoints.glob(f"*{MARK}"))
    return 2 * save_every if has_unfinished_save else save_every


def _records(run: RunFolder) -> list[Record]:
    """Return the evidence of trained steps in a run since its newest attempt that started at step 1."""
    attempts = attempts_since_reset(run)
    names = {attempt.name for attempt in attempts}
    since = max((int(attempt.name) for attempt in attempts if attempt.resume.get("step") == 0), default=0)
    records = []
    for attempt in attempts:
        if int(attempt.name) >= since:
            records += _attempt_records(attempt)
    for line in read_metrics(run.path):
        name = line.get("attempt", "")
        is_known = name in names
        if line["step"] > 0 and (not is_known or int(name) >= since):
            records.append(Record(line["step"], METRICS, is_of_unknown_attempt=not is_known))
    return records


def _attempt_records(attempt: Attempt) -> list[Record]:
    """Return the evidence in an attempt's result.json and heartbeats."""
    result, where = attempt.result, f"attempts/{attempt.name}"
    evidence = [(result.get("last_step"), "result.json", False)]
    for step in (result.get("checkpoint"), result.get("before"), attempt.resume.get("step")):
        evidence.append((step, "result.json", True))
    for beat in attempt.heartbeats().values():
        evidence.append((beat.get("step"), "heartbeat", bool(beat.get("checkpoint"))))
    return [
        Record(int(step), f"{where}/{name}", saved) for step, name, saved in evidence if is_number(step) and step > 0
    ]


def reset(run: RunFolder) -> list[Path]:
    """Reset a run to step 1 by renaming its metrics and checkpoints, so that nothing is deleted; return the new paths.

    The caller holds the lock of the run. Raises UserError if the run is done or a file cannot be renamed.
    """
    if run.done:
        raise UserError(f"{run.path} is done", "start a new run")
    number = max((int(attempt.name) for attempt in run.attempts), default=0)
    moved_paths = []
    with as_user_errors(run.path):
        write_json(run.path / RESET, {"t": time.time(), "after": number})
        for name in MOVED:
            source = run.path / name
            if source.is_dir() and not os.listdir(source):
                continue
            if os.path.lexists(source):
                moved_paths.append(Path(shutil.move(source, _free_name(source, number))))
        run.checkpoints.mkdir(exist_ok=True)
    return moved_paths


def _free_name(source: Path, number: int) -> Path:
    """Return an unused path such as `metrics-until-003.jsonl`, with `.2` if the run was reset twice after attempt 3."""
    target, copy = source.with_name(f"{source.stem}-until-{number:03d}{source.suffix}"), 2
    while os.path.lexists(target):
        target = source.with_name(f"{source.stem}-until-{number:03d}.{copy}{source.suffix}")
        copy += 1
    return target
