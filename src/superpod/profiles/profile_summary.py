"""A profile summed up: sums, bounds, changes, and the plan beside them, of a file or a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from superpod.common.files import is_number, read_json
from superpod.errors import UserError
from superpod.profiles import profile_bounds, profile_breakdown, profile_plan
from superpod.profiles.profile_bounds import Bound, Change
from superpod.profiles.profile_breakdown import TimeBreakdown
from superpod.profiles.profile_plan import Row
from superpod.profiles.profile_recording import Recording
from superpod.runtime.runs.run_folder import RunFolder

SCHEMA = 1


@dataclass(frozen=True)
class Planned:
    """The step of a plan."""

    source: str
    """the run, or the recipe at its size"""
    gpu: str
    terms_s: Mapping[str, float]


@dataclass(frozen=True)
class ProfileSummary:
    """What `recipes profile show` shows."""

    path: Path
    recording: Recording
    sums: TimeBreakdown
    bounds: list[Bound]
    changes: list[Change]
    planned: Planned | None
    rows: list[Row]
    notes: list[str]


def summarize(path: Path, recording: Recording, planned: Planned | None = None, top: int = 10) -> ProfileSummary:
    """The summary of a recording.

    Raises:
        UserError: nothing lies between the first step and the last.
    """
    sums = profile_breakdown.break_down(recording, top)
    if sums.seconds <= 0:
        raise UserError(f"{path} holds no time: its steps begin and end at one moment", "record whole steps")
    terms = planned.terms_s if planned else None
    rows = profile_plan.rows(terms, sums) if terms else []
    changes = profile_bounds.changes(recording, sums, terms)
    return ProfileSummary(
        *(path, recording, sums, profile_bounds.bounds(recording, sums), changes, planned, rows),
        notes=_notes(recording, sums, planned),
    )


def plan_of_run(run: RunFolder) -> Planned | None:
    """The plan that a run was started with; None where plan.json has no terms."""
    layouts = (read_json(run.path / "plan.json") or {}).get("layouts")
    first = layouts[0] if isinstance(layouts, list) and layouts and isinstance(layouts[0], dict) else {}
    terms = first.get("terms_s")
    if not isinstance(terms, dict) or not terms or not all(is_number(value) for value in terms.values()):
        return None
    query = (read_json(run.path / "plan.json") or {}).get("query")
    gpu = query.get("gpu") if isinstance(query, dict) else ""
    return Planned(f"{run.recipe}, {run.path / 'plan.json'}", str(gpu or ""), terms)


def _notes(recording: Recording, sums: TimeBreakdown, planned: Planned | None) -> list[str]:
    notes = [*recording.notes]
    if not recording.on_gpu:
        notes.append("recorded on CPUs: its times say nothing of GPUs, and no bound holds for them")
        if planned:
            notes.append(
                f"the plan is of {planned.gpu or 'GPUs'}, and what was measured of CPUs: only the lines compare"
            )
    if not recording.steps:
        notes.append("no mark says where a step begins: figures are of all that was recorded; --steps N divides them")
    if len(recording.gpus) > 1:
        notes.append(f"the file has {len(recording.gpus)} GPUs; --gpu N shows another")
    if sums.late_s > 0.01 * sums.seconds:
        notes.append(f"{sums.late_s:.3f} s of work lie outside of the steps, and are not counted")
    return notes


def as_json(summary: ProfileSummary) -> dict[str, Any]:
    """The summary for programs; seconds are of all recorded steps, but those of `planned` and `changes` of one."""
    recording = summary.recording
    planned = summary.planned
    return {
        "schema": SCHEMA,
        "file": str(summary.path),
        "tool": recording.tool,
        "device": recording.device,
        "on_gpu": recording.on_gpu,
        "rank": recording.rank,
        "gpus": list(recording.gpus),
        "marks": recording.marks,
        "sums": asdict(summary.sums),
        "counters": recording.counters,
        "bounds": [asdict(bound) for bound in summary.bounds],
        "changes": [asdict(change) for change in summary.changes],
        "planned": {"source": planned.source, "gpu": planned.gpu, "rows": [asdict(row) for row in summary.rows]}
        if planned
        else None,
        "notes": summary.notes,
    }
