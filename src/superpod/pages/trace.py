"""Render the predicted step as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing: a track per pipeline rank.

The format is Google's "Trace Event Format": complete events (`X`, with ts and dur in microseconds) on threads, metadata
(`M`) with their names, and flows (`s`, `f`) from the sending to the receiving pass. On each track, slices of category
`step` cover the time from 0 to the end of the step without gaps; slices of category `pass` are the terms of a pass.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from superpod.pages import GENERATOR
from superpod.pages.step_timeline import StepTimeline
from superpod.planner.planned_job import PlannedJob
from superpod.planner.timing.schedule import Event

TraceEvent: TypeAlias = dict[str, Any]

NAMES = {
    "compute": "compute",
    "recompute": "recomputation",
    "tp": "tensor-parallel communication, exposed",
    "cp": "context-parallel communication, exposed",
    "ep": "expert dispatch, exposed",
    "dp": "gradients and parameters, exposed",
    "overhead": "launches and fixed costs",
    "pp_p2p": "send, exposed",
    "optimizer": "optimizer step",
    "bubble": "bubble",
}
"""{term: name of its slices}."""
US = 1e6
"""Microseconds per second."""


def render_trace(job: PlannedJob, step: StepTimeline, *, title: str, command: str) -> str:
    """Return the trace of a simulated step as JSON, with `title` as the process name and `command` in its metadata."""
    facts = {
        "generator": GENERATOR,
        "title": title,
        "command": command,
        "step_time_s": step.step_s,
        "step_time_s_of_the_plan": step.plan_s,
        "unit": "ts and dur are in microseconds",
    }
    return json.dumps({"otherData": facts, "displayTimeUnit": "ms", "traceEvents": [*events(job, step, title)]})


def events(job: PlannedJob, step: StepTimeline, title: str) -> Iterator[TraceEvent]:
    """Yield all events of the trace of a simulated step; `title` is the process name."""
    yield _metadata("process_name", 0, title)
    for rank in range(step.ranks):
        yield _metadata("thread_name", rank, _name_track(job, rank))
        yield {"ph": "M", "pid": 0, "tid": rank, "name": "thread_sort_index", "args": {"sort_index": rank}}
        yield from _slices(step, rank)
    yield from _flows(job, step)


def _name_track(job: PlannedJob, rank: int) -> str:
    """Return the name of a pipeline rank's track: its GPUs and layers."""
    per_stage = job.gpus // job.layout.pp
    first = rank * per_stage
    layers = ", ".join(f"{r.start}-{r.stop - 1}" for r in job.split.stage_layers(job.model.layers, rank) if len(r))
    return f"pipeline rank {rank}: GPUs {first}-{first + per_stage - 1}, layers {layers or 'none'}"


def _metadata(name: str, tid: int, value: str) -> TraceEvent:
    return {"ph": "M", "pid": 0, "tid": tid, "name": name, "args": {"name": value}}


def _slices(step: StepTimeline, rank: int) -> Iterator[TraceEvent]:
    """Yield the passes of a rank, the bubbles between them, and the terms after the last pass."""
    time = 0.0
    for event in (event for event in step.events if event.stage == rank):
        if event.start > time:
            yield _slice(rank, "step", NAMES["bubble"], time, event.start)
        args = {"micro_batch": event.micro_batch, "chunk": event.chunk}
        yield _slice(rank, "step", f"{event.kind} {event.micro_batch}", event.start, event.end, args)
        yield from _pass_slices(step.passes[event.kind][rank], event)
        time = event.end
    if step.span_s > time:
        yield _slice(rank, "step", NAMES["bubble"], time, step.span_s)
    time = step.span_s
    for term, seconds in step.after.items():
        if seconds > 0:
            yield _slice(rank, "step", NAMES[term], time, time + seconds)
            time += seconds


def _pass_slices(parts: Mapping[str, float], event: Event) -> Iterator[TraceEvent]:
    """Yield the terms (seconds by term) of a pass; the last one ends with the pass."""
    time = event.start
    for i, (term, seconds) in enumerate(parts.items()):
        end = event.end if i == len(parts) - 1 else min(time + seconds, event.end)
        yield _slice(event.stage, "pass", NAMES[term], time, end)
        time = end


def _slice(
    rank: int, category: str, name: str, start: float, end: float, args: Mapping[str, int] | None = None
) -> TraceEvent:
    slice_ = {"ph": "X", "pid": 0, "tid": rank, "cat": category, "name": name, "ts": start * US}
    return slice_ | {"dur": (end - start) * US} | ({"args": args} if args else {})


def _flows(job: PlannedJob, step: StepTimeline) -> Iterator[TraceEvent]:
    """Yield an arrow from each pass to the pass that receives its activation or gradient."""
    pp, last = step.ranks, step.ranks * (job.layout.vp or 1) - 1
    # By kind, position of the chunk in the model, and micro-batch.
    passes = {(event.kind, event.chunk * pp + event.stage, event.micro_batch): event for event in step.events}
    number = 0
    for (kind, position, micro_batch), sender in passes.items():
        next_position = position + (1 if kind == "forward" else -1)
        if pp == 1 or not 0 <= next_position <= last:
            continue
        number += 1
        receiver = passes[kind, next_position, micro_batch]
        tensor = "activation" if kind == "forward" else "gradient"
        flow = {"pid": 0, "cat": "pipeline", "name": tensor, "id": number}
        yield flow | {"ph": "s", "tid": sender.stage, "ts": (sender.start + sender.end) / 2 * US}
        yield flow | {"ph": "f", "bp": "e", "tid": receiver.stage, "ts": (receiver.start + receiver.end) / 2 * US}
