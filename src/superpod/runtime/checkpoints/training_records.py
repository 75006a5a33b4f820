"""Evidence of trained steps in a run folder besides its checkpoints: would a start at step 1 discard a training?

Standard library only.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from superpod.common.files import is_number, read_json, write_json
from superpod.errors import UserError
from superpod.runtime.checkpoints.checkpoints import MARK
from superpod.runtime.runs.run_facts import METRICS, read_metrics
from superpod.runtime.runs.run_folder import Attempt, RunFolder, as_user_errors

RESET = "reset.json"
"""`RUN/reset.json`: `{"after": N}`, the number of the last attempt before `recipes ckpt reset`."""

MOVED = (METRICS, "saved.jsonl", "checkpoints")
"""What a reset renames, to `metrics-until-003.jsonl` and so on."""


@dataclass(frozen=True)
class Record:
    """A file's statement that the run has trained up to a step."""

    step: int
    source: str
    """the file, within the run folder"""
    is_saved: bool = False
    """the file also says that there was a checkpoint of this step or an earlier one"""
    is_of_unknown_attempt: bool = False


def counted(run: RunFolder) -> list[Attempt]:
    """The attempts since the last reset, or all attempts of a run that was never reset."""
    after = (read_json(run.path / RESET) or {}).get("after")
    first = int(after) + 1 if is_number(after) else 1
    return [attempt for attempt in run.attempts if int(attempt.name) >= first]


def lost_training(run: RunFolder) -> str:
    """Which training a start at step 1 would discard although a checkpoint must have existed; '' = none.

    Steps before the first checkpoint may be trained again. No checkpoint can have been complete after fewer steps than
    `save_every`, or after fewer than twice as many while the first save is still there, marked as unfinished. Any other
    record of a trained step means that checkpoints have disappeared. Raises OSError.
    """
    records = _records(run)
    if not records:
        return ""
    newest = max(records, key=lambda record: record.step)
    is_certain = any(record.is_saved or record.is_of_unknown_attempt for record in records)
    if not is_certain and newest.step < _first_complete_save(run):
        return ""
    saved = max((record for record in records if record.is_saved), key=lambda record: record.step, default=None)
    also = f", and {saved.source} a checkpoint" if saved and saved.source != newest.source else ""
    return f"{newest.source} records a training up to step {newest.step}{also}"


def _first_complete_save(run: RunFolder) -> float:
    """The number of steps after which a checkpoint must have been complete; 0 if the save interval is unknown."""
    save_every = run.facts.get("save_every")
    if not is_number(save_every) or save_every <= 0:
        return 0
    is_first_save_there = any(run.checkpoints.glob(f"*{MARK}"))
    return save_every * (2 if is_first_save_there else 1)


def _records(run: RunFolder) -> list[Record]:
    """Every record of a trained step since the newest attempt that started at step 1."""
    attempts = counted(run)
    names = {attempt.name for attempt in attempts}
    since = max((int(attempt.name) for attempt in attempts if attempt.resume.get("step") == 0), default=0)
    records = []
    for attempt in attempts:
        if int(attempt.name) >= since:
            records += _records_of(attempt)
    for line in read_metrics(run.path):
        name = line.get("attempt", "")
        is_known = name in names
        if line["step"] > 0 and (not is_known or int(name) >= since):
            records.append(Record(line["step"], METRICS, is_of_unknown_attempt=not is_known))
    return records


def _records_of(attempt: Attempt) -> list[Record]:
    result, where = attempt.result, f"attempts/{attempt.name}"
    saved = [result.get("checkpoint"), result.get("before"), attempt.resume.get("step")]
    steps = [(result.get("last_step"), "result.json", False), *((step, "result.json", True) for step in saved)]
    steps += [(beat.get("step"), "heartbeat", bool(beat.get("checkpoint"))) for beat in attempt.heartbeats().values()]
    return [
        Record(int(step), f"{where}/{name}", is_saved) for step, name, is_saved in steps if is_number(step) and step > 0
    ]


def reset(run: RunFolder) -> list[Path]:
    """Let the run start over at step 1: its records and checkpoints are renamed, not deleted. Call it under the lock.

    Returns the new paths. Raises UserError if the run is done or a file cannot be renamed.
    """
    if run.done:
        raise UserError(f"{run.path} is done", "start a new run")
    number = max((int(attempt.name) for attempt in run.attempts), default=0)
    moved = []
    with as_user_errors(run.path):
        write_json(run.path / RESET, {"t": time.time(), "after": number})
        for name in MOVED:
            source = run.path / name
            if source.is_dir() and not os.listdir(source):
                continue
            if os.path.lexists(source):
                moved.append(Path(shutil.move(source, _free_name(source, number))))
        run.checkpoints.mkdir(exist_ok=True)
    return moved


def _free_name(source: Path, number: int) -> Path:
    """`metrics-until-003.jsonl`, or with `.2` and so on where the run was reset before without an attempt between."""
    target, copy = source.with_name(f"{source.stem}-until-{number:03d}{source.suffix}"), 2
    while os.path.lexists(target):
        target = source.with_name(f"{source.stem}-until-{number:03d}.{copy}{source.suffix}")
        copy += 1
    return target
