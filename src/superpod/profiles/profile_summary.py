"""The summary of a profile: breakdown, bounds, suggested changes, and the comparison with a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from superpod.common.json_files import is_number, read_json
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
    """The planner's prediction of a step."""

    source: str
    """The run, or the recipe and its size."""
    gpu: str
    terms_s: Mapping[str, float]
    """{term: seconds per step}."""


@dataclass(frozen=True)
class ProfileSummary:
    """The content of the output of `recipes profile show`."""

    path: Path
    recording: Recording
    sums: TimeBreakdown
    bounds: list[Bound]
    changes: list[Change]
    planned: Planned | None
    rows: list[Row]
    notes: list[str]


def summarize(path: Path, recording: Recording, planned: Planned | None = None, top: int = 10) -> ProfileSummary:
    """Summarize the recording in the file `path`, and compare it with a plan if there is one.

    `top` is the maximum number of kernels or operations to list.

    Raises:
        UserError: the recorded steps have zero duration.
    """
    breakdown = profile_breakdown.break_down(recording, top)
    if breakdown.seconds <= 0:
        raise UserError(f"{path} has zero duration: its steps begin and end at the same time", "record complete steps")
    terms = planned.terms_s if planned else None
    return ProfileSummary(
        path=path,
        recording=recording,
        sums=breakdown,
        bounds=profile_bounds.bounds(recording, breakdown),
        changes=profile_bounds.changes(recording, breakdown, terms),
        planned=planned,
        rows=profile_plan.rows(terms, breakdown) if terms else [],
        notes=_notes(recording, breakdown, planned),
    )


def read_run_plan(run: RunFolder) -> Planned | None:
    """Return the predicted step in a run's plan.json; None if it has no terms."""
    plan = read_json(run.path / "plan.json") or {}
    layouts, query = plan.get("layouts"), plan.get("query")
    first = layouts[0] if isinstance(layouts, list) and layouts and isinstance(layouts[0], dict) else {}
    terms = first.get("terms_s")
    if not isinstance(terms, dict) or not terms or not all(is_number(value) for value in terms.values()):
        return None
    gpu = query.get("gpu") if isinstance(query, dict) else ""
    return Planned(f"{run.recipe}, {run.path / 'plan.json'}", str(gpu or ""), terms)


def _notes(recording: Recording, breakdown: TimeBreakdown, planned: Planned | None) -> list[str]:
    """Return notes for the user about the limits of a profile."""
    notes = [*recording.notes]
    if not recording.on_gpu:
        notes.append("recorded on CPUs: its times are not representative of GPUs, and the bounds do not apply")
        if planned:
            notes.append(f"the plan is for {planned.gpu or 'GPUs'}, but the profile is from CPUs: do not compare times")
    if not recording.steps:
        notes.append("the file has no step markers: the times are those of the entire recording; set --steps N")
    if len(recording.gpus) > 1:
        notes.append(f"the file has {len(recording.gpus)} GPUs; select one with --gpu N")
    if breakdown.late_s > 0.01 * breakdown.seconds:
        device = "GPU" if recording.on_gpu else "CPU"
        notes.append(f"{breakdown.late_s:.3f} s of {device} time falls outside the profiled steps and is not counted")
    return notes


def as_json(summary: ProfileSummary) -> dict[str, Any]:
    """Return the summary as a JSON object. Times are totals of all steps, but per step in `planned` and `changes`."""
    recording = summary.recording
    planned = None
    if summary.planned:
        rows = [asdict(row) for row in summary.rows]
        planned = {"source": summary.planned.source, "gpu": summary.planned.gpu, "rows": rows}
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
        "planned": planned,
        "notes": summary.notes,
    }
