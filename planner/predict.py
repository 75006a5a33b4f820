"""Memory and step time of given runs: one `Job`, or a table of published rows, with a verdict each.

>>> from superpod.planner import predict
>>> predict.one(job).verdict
'ok'
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from superpod.planner import columns, legality, memory, published, steptime
from superpod.planner.columns import Stages
from superpod.planner.errors import UserError
from superpod.planner.job import Job
from superpod.planner.layout import Layout
from superpod.planner.models import Split

Verdict = Literal["ok", "oom", "illegal", "unsupported"]
GIB = 2**30


@dataclass(frozen=True)
class Prediction:
    """What a run is expected to take. Figures are there for `oom` too, and absent for `illegal` and `unsupported`.

    `oom` is what cannot be: tensors alone exceed the limit. A plan asks for more, that what the allocator reserves for
    them is within it (`tight` is what lies between, and may run with expandable segments).
    """

    verdict: Verdict
    reason: str = ""
    """Every rule broken, or what does not fit; warnings of a run that is fine."""
    step_time_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    mfu: float | None = None
    limit_gib: float = 0.0
    """What a rank may take."""
    allocated_gib_first: float | None = None
    allocated_gib_last: float | None = None
    allocated_gib_max: float | None = None
    reserved_gib_max: float | None = None
    terms_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the step by what they are spent on; they add up to `step_time_s`."""
    owners_gib: Mapping[str, float] = field(default_factory=dict)
    """GiB at the peak of the fullest rank by owner; they add up to `allocated_gib_max`."""

    @property
    def short_gib(self) -> float:
        """What the fullest rank would reserve beyond the limit; 0 or less = it fits."""
        return (self.reserved_gib_max or 0.0) - self.limit_gib

    @property
    def tight(self) -> bool:
        """Whether it may run, but only without fragmentation."""
        return self.verdict == "ok" and self.short_gib > 0


def one(job: Job) -> Prediction:
    """The run of one job."""
    return many([job])[0]


def many(jobs: Sequence[Job]) -> list[Prediction]:
    """The runs of many jobs, in their order; those that differ in their layout only are costed together."""
    found: list[Prediction | None] = [None] * len(jobs)
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, job in enumerate(jobs):
        alike[_setting(job)].append(i)
    for places in alike.values():
        group = [jobs[i] for i in places]
        refused = _refused(group)
        for i, why in zip(places, refused, strict=True):
            found[i] = Prediction("illegal", why) if why else None
        legal = [i for i, why in zip(places, refused, strict=True) if not why]
        for i, prediction in zip(legal, _costed([jobs[i] for i in legal]) if legal else [], strict=True):
            found[i] = prediction
    return [each for each in found if each is not None]


def _refused(jobs: list[Job]) -> list[str]:
    """Why each of these jobs is illegal, "" where it is not: asked of all at once, and worded for those that are."""
    values = columns.fields(_layouts(jobs), [job.gpus for job in jobs])
    values["gpus"] = np.array([job.gpus for job in jobs])
    asked = {name: values[name] for name in legality.FIELDS if name in values and name != "dp"}
    counted = [column for name, column in asked.items() if name not in ZERO_OR_MORE]
    wrong = np.logical_or.reduce([column < 1 for column in counted])
    mask = legality.legal_mask(jobs[0], {name: np.where(wrong, 1, column) for name, column in asked.items()})
    own = [
        x.chunks is not None or x.first_layers is not None or x.last_layers is not None or 0 in (x.vp, x.etp)
        for x in _layouts(jobs)
    ]
    return [
        "; ".join(each.message for each in legality.violations(job)) if ask else ""
        for job, ask in zip(jobs, ~mask | wrong | np.array(own), strict=True)
    ]


def _layouts(jobs: list[Job]) -> list[Layout]:
    return [job.layout for job in jobs]


ZERO_OR_MORE = (
    *("sp", "recompute", "recompute_block", "modules", "sharding"),
    *("embedding_as_layer", "loss_as_layer"),
)
"""Columns that count nothing: all others are 1 or more."""


def rows(table: Iterable[published.Row]) -> list[Prediction]:
    """The runs of published rows (columns of contracts.md), in their order."""
    found: list[Prediction] = []
    jobs: list[Job] = []
    places: list[int] = []
    for row in table:
        try:
            jobs.append(published.job(row))
            places.append(len(found))
            found.append(Prediction("ok"))
        except published.Unsupported as why:
            found.append(Prediction("unsupported", str(why)))
        except UserError as why:
            found.append(Prediction("illegal", str(why)))
        except (ArithmeticError, LookupError, TypeError, ValueError) as why:  # a row's text is anybody's
            found.append(Prediction("illegal", f"the row cannot be read: {why}"))
    for place, prediction in zip(places, many(jobs), strict=True):
        found[place] = prediction
    return found


def _setting(job: Job) -> tuple[object, ...]:
    """All of a job but its layout and size: jobs with the same are columns of one table."""
    return (job.model, job.node, job.fabric, job.seq, job.precision, job.task, job.options)


def _costed(jobs: list[Job]) -> list[Prediction]:
    job = jobs[0]
    ways: dict[Split, int] = {}
    way = np.array([ways.setdefault(_way(each), len(ways)) for each in jobs])
    values = columns.fields(_layouts(jobs), [each.gpus for each in jobs])
    table = Stages(job.model, list(ways)).columns(way, values)
    step = steptime.step(job, table)
    peak, limit = memory.peak(job, table), memory.limit(job)
    held = table.weight > 0
    allocated = peak.allocated
    fullest = np.where(held, allocated, 0).argmax(axis=1)
    at = np.arange(len(jobs)), fullest
    seconds = np.broadcast_to(step.seconds, len(jobs))
    rate = np.array([each.tokens / each.gpus for each in jobs]) / seconds
    most = np.where(held, peak.reserved, 0).max(axis=1)
    figures = {
        "step_time_s": seconds,
        "tokens_per_s_per_gpu": rate,
        "mfu": rate * steptime.mfu(job, job.tokens / job.gpus),
        "allocated_gib_first": np.where(table.first & held, allocated, 0).max(axis=1) / GIB,
        "allocated_gib_last": np.where(table.last & held, allocated, 0).max(axis=1) / GIB,
        "allocated_gib_max": allocated[at] / GIB,
        "reserved_gib_max": most / GIB,
    }
    short = ((np.where(held, peak.needed, 0).max(axis=1) - limit) / GIB).tolist()
    terms = _rows({key: np.broadcast_to(part, len(jobs)) for key, part in step.terms.items()})
    by_owner = _rows({key: part[at] / GIB for key, part in peak.owners.items()})
    return [
        Prediction(
            verdict="oom" if over > 0 else "ok",
            reason=f"{over:.1f} GiB short of {limit / GIB:.1f} GiB usable" if over > 0 else "",
            limit_gib=limit / GIB,
            **values,
            terms_s=spent,
            owners_gib=owned,
        )
        for over, values, spent, owned in zip(short, _rows(figures), terms, by_owner, strict=True)
    ]


def _rows(table: Mapping[str, NDArray[np.float64]]) -> list[dict[str, float]]:
    """Columns as a mapping for each row."""
    lists = [column.tolist() for column in table.values()]
    return [dict(zip(table, row, strict=True)) for row in zip(*lists, strict=True)]


def _way(job: Job) -> Split:
    """The part of a layout that decides which layers a pipeline rank holds."""
    x = job.layout
    return Split(
        pp=x.pp,
        vp=x.vp or 1,
        embedding_as_layer=x.embedding_as_layer,
        loss_as_layer=x.loss_as_layer,
        first_layers=x.first_layers,
        last_layers=x.last_layers,
        chunks=x.chunks,
    )
