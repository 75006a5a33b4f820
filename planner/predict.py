"""Memory and step time of given runs, one or many, with a verdict for each.

>>> from superpod.planner import predict
>>> predict.one(job).verdict
'ok'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from superpod.planner import columns, legality, memory, steptime
from superpod.planner.arrays import Array, Column
from superpod.planner.columns import Stages
from superpod.planner.hardware import GIB
from superpod.planner.layout import Layout
from superpod.planner.models import Split
from superpod.planner.planned_job import PlannedJob

Verdict = Literal["ok", "oom", "illegal", "unsupported"]


@dataclass(frozen=True)
class Prediction:
    """Expected memory and time of a run. `oom` has figures too; `illegal` and `unsupported` have none.

    `oom` = it does not fit, and `ok` = it fits or is tight, by `memory.capacity.fit_of`, which every command asks.
    """

    verdict: Verdict
    reason: str = ""
    """Every rule broken, what does not fit or is tight; warnings of a run that is fine."""
    fit: memory.Fit | None = None
    """Whether memory holds it; None where it is not known."""
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
    """Seconds of the step by term; they add up to `step_time_s`."""
    owners_gib: Mapping[str, float] = field(default_factory=dict)
    """GiB at the peak of the fullest rank by owner; they add up to `allocated_gib_max`."""

    @property
    def short_gib(self) -> float:
        """What the fullest rank would reserve beyond the limit; 0 or less = it fits."""
        return (self.reserved_gib_max or 0.0) - self.limit_gib

    @property
    def tight(self) -> bool:
        """Whether it may run, but only without fragmentation."""
        return self.fit == "tight"

    @property
    def outcome(self) -> str:
        """The verdict, or `tight`."""
        return "tight" if self.tight else self.verdict


class Run(NamedTuple):
    """One run of many that share a setting: what differs between them stands beside it."""

    setting: PlannedJob
    """All but layout and number of GPUs, whose values here mean nothing: runs that share it share the object."""
    layout: Layout
    """Its gbs means nothing either."""
    gpus: int
    gbs: int
    note: str = ""
    """Something about the run that its `reason` repeats."""

    @classmethod
    def of(cls, job: PlannedJob) -> Run:
        """A job in this form."""
        return cls(job, job.layout, job.gpus, job.layout.gbs)

    @property
    def job(self) -> PlannedJob:
        """The run as a whole."""
        return self.setting.replace(layout=self.layout.replace(gbs=self.gbs), gpus=self.gpus)


def one(job: PlannedJob) -> Prediction:
    """The run of one job."""
    return many([job])[0]


def many(jobs: Sequence[PlannedJob]) -> list[Prediction]:
    """The runs of many jobs, in their order; those that differ in their layout only are costed together."""
    return runs([Run.of(job) for job in jobs])


def runs(runs: Sequence[Run]) -> list[Prediction]:
    """Predictions in the order of the runs; those that share a setting are costed together."""
    groups: dict[tuple[object, ...], list[int]] = {}
    of_setting: dict[int, list[int]] = {}
    for i, run in enumerate(runs):
        places = of_setting.get(id(run.setting))
        if places is None:
            places = of_setting[id(run.setting)] = groups.setdefault(_setting(run.setting), [])
        places.append(i)
    predictions: dict[int, Prediction] = {}
    for places in groups.values():
        predictions.update(zip(places, _alike([runs[i] for i in places]), strict=True))
    return [predictions[i] for i in range(len(runs))]


def _alike(runs: list[Run]) -> list[Prediction]:
    """Runs of one setting."""
    gpus = [run.gpus for run in runs]
    values = columns.fields([run.layout for run in runs], gpus, [run.gbs for run in runs])
    values["gpus"] = np.array(gpus)
    refused = _refused(runs, values)
    predictions = {i: Prediction("illegal", why) for i, why in refused.items()}
    legal = [i for i in range(len(runs)) if i not in refused]
    if legal:
        kept = {name: column[legal] for name, column in values.items()}
        predictions.update(zip(legal, _costed([runs[i] for i in legal], kept), strict=True))
    return [predictions[i] for i in range(len(runs))]


def _refused(runs: list[Run], values: Mapping[str, Column]) -> dict[int, str]:
    """Why runs are illegal, by index. A mask checks all at once; only suspects get the slow check with messages."""
    checked = {name: values[name] for name in legality.FIELDS if name in values and name != "dp"}
    counted = [column for name, column in checked.items() if name not in ZERO_OR_MORE]
    wrong = np.logical_or.reduce([column < 1 for column in counted])
    layers = runs[0].setting.model.layers
    given_chunks, odd = (np.array([test(run.layout, layers) for run in runs]) for test in (_has_valid_chunks, _is_odd))
    checked = {name: np.where(wrong, 1, column) for name, column in checked.items()}
    mask = legality.legal_mask(runs[0].setting, checked, given_chunks)
    suspects = np.flatnonzero(~mask | wrong | odd).tolist()
    worded = {i: "; ".join(broken.message for broken in legality.violations(runs[i].job)) for i in suspects}
    return {i: why for i, why in worded.items() if why}


def _has_valid_chunks(x: Layout, layers: int) -> bool:
    """Whether its chunks hold exactly the model's layers, and no other field partitions them."""
    if x.chunks is None or x.embedding_as_layer or x.loss_as_layer or _has_ends(x):
        return False
    return len(x.chunks) == x.pp * (x.vp or 1) and sum(x.chunks) == layers


def _has_ends(x: Layout) -> bool:
    return x.first_layers is not None or x.last_layers is not None


def _is_odd(x: Layout, layers: int) -> bool:
    """Whether `legality.legal_mask` alone cannot judge the layout."""
    chunks = x.chunks is not None and (not _has_valid_chunks(x, layers) or x.recompute_layers > 1)
    return chunks or _has_ends(x) or 0 in (x.vp, x.etp)


ZERO_OR_MORE = (
    *("sp", "recompute", "recompute_block", "modules", "sharding"),
    *("embedding_as_layer", "loss_as_layer"),
)
"""Columns that are no counts; all others must be 1 or more."""


def _setting(job: PlannedJob) -> tuple[object, ...]:
    """All of a job but its layout and size: jobs with the same are columns of one table."""
    return (job.model, job.node, job.fabric, job.seq, job.precision, job.task, job.options)


def _costed(runs: list[Run], values: Mapping[str, Column]) -> list[Prediction]:
    """Legal runs of one setting; `values` as `columns.fields` gives them, and `gpus`."""
    job, count = runs[0].setting, len(runs)
    ways: dict[tuple[Any, ...], int] = {}
    way = np.array([ways.setdefault(_way(run.layout), len(ways)) for run in runs])
    table = Stages(job.model, [Split(**dict(zip(WAY, split, strict=True))) for split in ways]).columns(way, values)
    step = steptime.step(job, table)
    peak, limit = memory.peak(job, table), memory.limit(job)
    held = table.weight > 0  # entries of weight 0 only pad the table
    at = np.arange(count), np.where(held, peak.allocated, 0).argmax(axis=1)  # the fullest rank of every run
    seconds = np.broadcast_to(step.seconds, count)
    rate = values["gbs"] * job.seq / values["gpus"] / seconds
    needed, reserved = (np.where(held, part, 0).max(axis=1) for part in (peak.needed, peak.reserved))
    fits = [memory.FIT[code] for code in memory.fit_of(job, needed, reserved).tolist()]
    figures = {
        "step_time_s": seconds,
        "tokens_per_s_per_gpu": rate,
        "mfu": rate * steptime.mfu(job, job.tokens / job.gpus),
        "allocated_gib_first": np.where(table.first & held, peak.allocated, 0).max(axis=1) / GIB,
        "allocated_gib_last": np.where(table.last & held, peak.allocated, 0).max(axis=1) / GIB,
        "allocated_gib_max": peak.allocated[at] / GIB,
        "reserved_gib_max": reserved / GIB,
    }
    terms = _rows({key: np.broadcast_to(part, count) for key, part in step.terms.items()})
    by_owner = _rows({key: part[at] / GIB for key, part in peak.owners.items()})
    return [
        Prediction(
            verdict="oom" if fit == "does not fit" else "ok",
            reason="; ".join(filter(None, [_of_memory(fit, wants / GIB, holds / GIB, limit / GIB), run.note])),
            fit=fit,
            limit_gib=limit / GIB,
            **figures,
            terms_s=spent,
            owners_gib=owned,
        )
        for run, fit, wants, holds, figures, spent, owned in zip(
            runs, fits, needed.tolist(), reserved.tolist(), _rows(figures), terms, by_owner, strict=True
        )
    ]


def _of_memory(fit: memory.Fit, needed: float, reserved: float, limit: float) -> str:
    """What is short, GiB; "" = nothing."""
    if fit == "does not fit":
        over = max(needed, reserved) - limit
        return f"{over:.1f} GiB short of {limit:.1f} GiB usable"
    return f"tight: {reserved:.1f} GiB reserved of {limit:.1f} GiB usable" if fit == "tight" else ""


def _rows(table: Mapping[str, Array]) -> list[dict[str, float]]:
    """Columns as a mapping for each row."""
    lists = [column.tolist() for column in table.values()]
    return [dict(zip(table, row, strict=True)) for row in zip(*lists, strict=True)]


WAY = ("pp", "vp", "embedding_as_layer", "loss_as_layer", "first_layers", "last_layers", "chunks")
"""Fields of a layout that decide which layers a pipeline rank holds."""


def _way(x: Layout) -> tuple[Any, ...]:
    return (x.pp, x.vp or 1, x.embedding_as_layer, x.loss_as_layer, x.first_layers, x.last_layers, x.chunks)
