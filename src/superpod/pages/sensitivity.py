"""Predicts throughput for other sequence lengths, batch sizes, bandwidths, expert balances and numbers of GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from superpod.planner import predict
from superpod.planner.planned_job import PlannedJob

Curve: TypeAlias = dict[str, Any]
"""A curve in the format of `assets/plan/layout.js`."""

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
SIZES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
IMBALANCES = (1.0, 1.1, 1.25, 1.5, 2.0)


class Variation(NamedTuple):
    """A quantity that is varied, and the job for each of its values."""

    key: str
    title: str
    unit: str
    jobs: list[tuple[float, PlannedJob]]
    """(value, job)."""


def sensitivity_curves(jobs: Sequence[PlannedJob]) -> list[dict[str, list[Curve]]]:
    """Return {"scaling": curves, "sensitivity": curves} for each job.

    A point has the throughput, memory and verdict for a value. All points are predicted in a single call, which
    vectorizes over jobs that differ only in their layouts.
    """
    variations_of_jobs = [{"scaling": [*_vary_size(job)], "sensitivity": [*_vary_job(job)]} for job in jobs]
    all_variations = [variation for parts in variations_of_jobs for part in parts.values() for variation in part]
    predictions = iter(predict.many([job for variation in all_variations for _, job in variation.jobs]))
    return [
        {name: [_build_curve(variation, predictions) for variation in part] for name, part in parts.items()}
        for parts in variations_of_jobs
    ]


def _build_curve(variation: Variation, predictions: Iterator[predict.Prediction]) -> Curve:
    """Return the curve of a variation; takes the next prediction for each of its values."""
    points = [_build_point(value, next(predictions)) for value, _ in variation.jobs]
    return {"key": variation.key, "title": variation.title, "unit": variation.unit, "points": points}


def _build_point(value: float, prediction: predict.Prediction) -> dict[str, Any]:
    return {
        "value": value,
        "rate": prediction.tokens_per_s_per_gpu,
        "gib": prediction.reserved_gib_max,
        "verdict": prediction.outcome,
        "reason": prediction.reason,
    }


def _vary_job(job: PlannedJob) -> Iterator[Variation]:
    """Yield the variations of sequence length, batch size, bandwidths and expert balance that apply to a job."""
    layout = job.layout
    yield Variation("seq", "sequence length", "tokens", _scale(job.seq, lambda seq: job.replace(seq=seq)))
    by_gbs = _scale(layout.gbs, lambda gbs: job.replace(layout=layout.replace(gbs=gbs)))
    yield Variation("gbs", "global batch size", "samples", by_gbs)
    fabric_gb_s = job.fabric.gb_per_s_per_gpu(job.node)
    if job.gpus > job.node.nvlink_domain and fabric_gb_s:
        by_network = [(fabric_gb_s * f, _scale_link_bandwidth(job, f)) for f in FACTORS]
        yield Variation("far", "network bandwidth between nodes", "GB/s per GPU", by_network)
    nvlink_gb_s = job.node.gpu.nvlink_gb_per_s
    if nvlink_gb_s and job.node.nvlink_domain > 1:
        by_nvlink = [(nvlink_gb_s * f, _scale_nvlink(job, f)) for f in FACTORS]
        yield Variation("near", "NVLink bandwidth", "GB/s per GPU", by_nvlink)
    if job.model.is_moe:
        options = [(value, replace(job.options, imbalance=value)) for value in IMBALANCES]
        jobs = [(value, job.replace(options=option)) for value, option in options]
        yield Variation("imbalance", "load of the busiest expert rank relative to the mean", "times", jobs)


def _vary_size(job: PlannedJob) -> Iterator[Variation]:
    """Yield the variations of the number of GPUs for strong and weak scaling; only the data-parallel size changes."""
    strong_scaling = _scale(job.gpus, lambda gpus: job.replace(gpus=gpus), SIZES)
    weak_scaling = []
    for gpus, scaled_job in strong_scaling:
        gbs = max(1, job.layout.gbs * scaled_job.gpus // job.gpus)
        weak_scaling.append((gpus, scaled_job.replace(layout=job.layout.replace(gbs=gbs))))
    yield Variation("strong", "strong scaling: fixed global batch size", "GPUs", strong_scaling)
    yield Variation("weak", "weak scaling: fixed batch size per GPU", "GPUs", weak_scaling)


def _scale(
    value: int, make_job: Callable[[int], PlannedJob], factors: tuple[float, ...] = FACTORS
) -> list[tuple[float, PlannedJob]]:
    """Return (scaled value, job with it) for each factor that yields a positive integer."""
    scaled = [round(value * f) for f in factors if value * f >= 1 and (value * f) % 1 == 0]
    return [(size, make_job(size)) for size in scaled]


def _scale_link_bandwidth(job: PlannedJob, factor: float) -> PlannedJob:
    """Return the job with the bandwidth of all network ports and switches scaled."""
    node = job.node.replace(nic_gbps=job.node.nic_gbps * factor)
    return job.replace(node=node, fabric=job.fabric.replace(gbps=job.fabric.gbps * factor))


def _scale_nvlink(job: PlannedJob, factor: float) -> PlannedJob:
    """Return the job with the bandwidth of NVLink scaled."""
    gpu = job.node.gpu.replace(nvlink_gb_per_s=job.node.gpu.nvlink_gb_per_s * factor)
    return job.replace(node=job.node.replace(gpu=gpu))
