"""What a run folder records of a training, besides its checkpoints: whether a start at step 1 would discard steps.

Standard library only.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from superpod.errors import UserError
from superpod.node.checkpoints import MARK
from superpod.node.files import is_number, read_json, read_lines, write_json
from superpod.node.run_facts import metrics
from superpod.node.run_folder import Attempt, RunFolder, as_user_errors

RESET = "reset.json"
"""`RUN/reset.json`: `{"after": number of the last attempt before its user let the run start over}`."""

MOVED = ("metrics.jsonl", "saved.jsonl", "checkpoints")
"""What a reset moves aside, as `metrics-until-003.jsonl` and so on."""


@dataclass(frozen=True)
class Record:
    """A step that some file of the run says was trained."""

    step: int
    source: str
    """the file, within the run folder"""
    is_saved: bool = False
    """the file also says that a checkpoint of it, or of an earlier one, was there"""
    is_of_unknown_attempt: bool = False


def counted(run: RunFolder) -> list[Attempt]:
    """The attempts since the user let the run start over; all of them where that never happened."""
    after = (read_json(run.path / RESET) or {}).get("after")
    first = int(after) + 1 if is_number(after) else 1
    return [attempt for attempt in run.attempts if int(attempt.name) >= first]


def lost_training(run: RunFolder) -> str:
    """Which training a start at step 1 would discard, without a checkpoint; '' for none.

    Steps before the first checkpoint are nobody's fault: they are discarded where the records agree that no checkpoint
    can have been complete, i.e. fewer steps than `save_every`, or fewer than two such intervals and the first save is
    still there, marked as unfinished. Any other record of a trained step says that checkpoints have disappeared.
    Raises OSError.
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
    """Steps from which on a checkpoint must have been complete; 0 where the run does not say how often it saves."""
    save_every = run.facts.get("save_every")
    if not is_number(save_every) or save_every <= 0:
        return 0
    is_first_save_there = any(run.checkpoints.glob(f"*{MARK}"))
    return save_every * (2 if is_first_save_there else 1)


def _records(run: RunFolder) -> list[Record]:
    """Every record of a trained step since the newest attempt that was decided to start at step 1."""
    attempts = counted(run)
    names = {attempt.name for attempt in attempts}
    since = max((int(attempt.name) for attempt in attempts if attempt.resume.get("step") == 0), default=0)
    records = []
    for attempt in attempts:
        if int(attempt.name) >= since:
            records += _of_attempt(attempt)
    for line in metrics(read_lines(run.path / "metrics.jsonl")):
        name = line.get("attempt", "")
        is_known = name in names
        if line["step"] > 0 and (not is_known or int(name) >= since):
            records.append(Record(line["step"], "metrics.jsonl", is_of_unknown_attempt=not is_known))
    return records


def _of_attempt(attempt: Attempt) -> list[Record]:
    result, where = attempt.result, f"attempts/{attempt.name}"
    saved = [result.get("checkpoint"), result.get("before"), attempt.resume.get("step")]
    steps = [(result.get("last_step"), "result.json", False), *((step, "result.json", True) for step in saved)]
    steps += [(beat.get("step"), "heartbeat", bool(beat.get("checkpoint"))) for beat in attempt.heartbeats().values()]
    return [
        Record(int(step), f"{where}/{name}", is_saved) for step, name, is_saved in steps if is_number(step) and step > 0
    ]


def reset(run: RunFolder) -> list[Path]:
    """Let the run start over at step 1, under its lock: its records and checkpoints are moved aside, none is deleted.

    Returns the names that they have now. Raises UserError, as for a run that is done.
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
