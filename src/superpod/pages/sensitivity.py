"""Sensitivity of throughput to sequence length, batch size, bandwidth, expert balance and number of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from superpod.planner import predict
from superpod.planner.planned_job import PlannedJob

Curve: TypeAlias = dict[str, Any]

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
SIZES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
IMBALANCES = (1.0, 1.1, 1.25, 1.5, 2.0)


class Change(NamedTuple):
    """A curve: the values of one quantity, and the job for each value."""

    key: str
    title: str
    unit: str
    jobs: list[tuple[float, PlannedJob]]


def sensitivity_curves(jobs: Sequence[PlannedJob]) -> list[dict[str, list[Curve]]]:
    """Return the scaling and sensitivity curves of each job in the format of `assets/plan/layout.js`.

    A point has the throughput, memory and verdict for a value. All points are predicted in a single call, which
    vectorizes over jobs that differ only in their layouts.
    """
    changes_of_jobs = [{"scaling": [*_sizes(job)], "sensitivity": [*_changes(job)]} for job in jobs]
    changed_jobs = []
    for parts in changes_of_jobs:
        for changes in parts.values():
            for change in changes:
                changed_jobs += [job for _, job in change.jobs]

    predictions = iter(predict.many(changed_jobs))
    return [
        {part: [_curve(change, predictions) for change in changes] for part, changes in parts.items()}
        for parts in changes_of_jobs
    ]


def _curve(change: Change, predictions: Iterator[predict.Prediction]) -> Curve:
    """Return a curve, consuming one prediction per value."""
    points = [_point(value, next(predictions)) for value, _ in change.jobs]
    return {"key": change.key, "title": change.title, "unit": change.unit, "points": points}


def _point(value: float, prediction: predict.Prediction) -> dict[str, Any]:
    return {
        "value": value,
        "rate": prediction.tokens_per_s_per_gpu,
        "gib": prediction.reserved_gib_max,
        "verdict": prediction.outcome,
        "reason": prediction.reason,
    }


def _changes(job: PlannedJob) -> Iterator[Change]:
    layout = job.layout
    yield Change("seq", "sequence length", "tokens", _scale(job.seq, lambda seq: job.replace(seq=seq)))
    by_gbs = _scale(layout.gbs, lambda gbs: job.replace(layout=layout.replace(gbs=gbs)))
    yield Change("gbs", "global batch size", "samples", by_gbs)
    fabric_gb_s = job.fabric.gb_per_s_per_gpu(job.node)
    if job.gpus > job.node.nvlink_domain and fabric_gb_s:
        by_network = [(fabric_gb_s * f, _scale_link_bandwidth(job, f)) for f in FACTORS]
        yield Change("far", "network bandwidth between nodes", "GB/s per GPU", by_network)
    nvlink_gb_s = job.node.gpu.nvlink_gb_per_s
    if nvlink_gb_s and job.node.nvlink_domain > 1:
        by_nvlink = [(nvlink_gb_s * f, _scale_nvlink(job, f)) for f in FACTORS]
        yield Change("near", "NVLink bandwidth", "GB/s per GPU", by_nvlink)
    if job.model.is_moe:
        options = [(value, replace(job.options, imbalance=value)) for value in IMBALANCES]
        jobs = [(value, job.replace(options=option)) for value, option in options]
        yield Change("imbalance", "load of the busiest expert rank relative to the mean", "times", jobs)


def _sizes(job: PlannedJob) -> Iterator[Change]:
    """Yield the curves of strong and weak scaling, in which only the data-parallel size changes."""
    strong_scaling = _scale(job.gpus, lambda gpus: job.replace(gpus=gpus), SIZES)
    weak_scaling = []
    for gpus, scaled_job in strong_scaling:
        gbs = max(1, job.layout.gbs * scaled_job.gpus // job.gpus)
        weak_scaling.append((gpus, scaled_job.replace(layout=job.layout.replace(gbs=gbs))))
    yield Change("strong", "strong scaling: fixed global batch size", "GPUs", strong_scaling)
    yield Change("weak", "weak scaling: fixed batch size per GPU", "GPUs", weak_scaling)


def _scale(
    value: int, make_job: Callable[[int], PlannedJob], factors: tuple[float, ...] = FACTORS
) -> list[tuple[float, PlannedJob]]:
    scaled = [round(value * f) for f in factors if value * f >= 1 and (value * f) % 1 == 0]
    return [(one, make_job(one)) for one in scaled]


def _scale_link_bandwidth(job: PlannedJob, factor: float) -> PlannedJob:
    """Scale the bandwidth of network ports and switches."""
    node = job.node.replace(nic_gbps=job.node.nic_gbps * factor)
    return job.replace(node=node, fabric=job.fabric.replace(gbps=job.fabric.gbps * factor))


def _scale_nvlink(job: PlannedJob, factor: float) -> PlannedJob:
    gpu = job.node.gpu.replace(nvlink_gb_per_s=job.node.gpu.nvlink_gb_per_s * factor)
    return job.replace(node=job.node.replace(gpu=gpu))
