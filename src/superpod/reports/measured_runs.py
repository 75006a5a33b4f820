"""Finished runs as measurements for calibration: the job of plan.json, and the median time of its steps."""

from __future__ import annotations

from superpod.errors import UserError
from superpod.planner import columns
from superpod.planner.calibration.calibrate import MeasuredRun
from superpod.planner.timing import steptime
from superpod.reports import report
from superpod.reports.runs.run_plan import planned_job
from superpod.runtime.runs.run_folder import RunFolder

LEAST_S = 1e-6
"""A kernel launch takes longer; a shorter step is a typing error, or has another unit."""
LEAST_STEPS = 3
"""Fewest steps after the first from which the step time is taken."""
MOST_TIMES_PLANNED = 200
"""A step that takes more than this many times its plan is a typing error, or has another unit."""


def measure_run(run: RunFolder) -> MeasuredRun:
    """The measurement of a finished run.

    Raises:
        UserError: it ran on CPUs, has too few steps, or its plan contains something unknown to the planner.
    """
    summary = report.summary(run)
    if summary.rehearsal:
        raise UserError(f"{run.path} is a rehearsal: it ran on CPUs", "name runs on GPUs")
    rate = summary.tokens_per_s_per_gpu
    if rate is None or summary.steps < LEAST_STEPS:
        raise UserError(f"{run.path} has {summary.steps} measured steps", f"name runs of {LEAST_STEPS} steps or more")
    job = planned_job(run)
    measured = MeasuredRun(run.path.name, job, job.tokens / rate / job.gpus, summary.peak_allocated_gib)
    contradiction = find_contradiction(measured)
    if contradiction:
        raise UserError(
            f"{run.path}: {contradiction}", "its plan.json and metrics.jsonl belong to different jobs, or were edited"
        )
    return measured


def find_contradiction(run: MeasuredRun) -> str:
    """The reason why no GPU can have measured this; "" if one can.

    Checks for an illegal layout, more memory than the GPU has, a rate above its peak, and an implausible step time.
    """
    try:
        columns.from_job(run.job)
    except UserError as error:
        return str(error)
    return _too_large(run) or _too_slow(run) or _too_fast(run)


def _too_large(run: MeasuredRun) -> str:
    """The peaks that exceed the memory of the GPU."""
    gpu = run.job.node.gpu
    peaks = {"allocated": run.allocated_gib, "reserved": run.reserved_gib}
    over = [f"{size:,.5g} GiB {what}" for what, size in peaks.items() if size is not None and size > gpu.hbm_usable_gib]
    if not over:
        return ""
    has = f"the {gpu.name} has {gpu.hbm_usable_gib:g} GiB"
    return f"{' and '.join(over)}, but {has}; specify the peak of one GPU, in GiB"


def _too_slow(run: MeasuredRun) -> str:
    expected = float(steptime.step(run.job, columns.from_job(run.job)).seconds)
    if run.seconds <= MOST_TIMES_PLANNED * expected:
        return ""
    return f"a step of {run.seconds:.4g} s is over {MOST_TIMES_PLANNED:,} times the planned {expected:.4g} s"


def _too_fast(run: MeasuredRun) -> str:
    """A step shorter than a kernel launch, or a rate above the GPU's peak.

    Attention is not counted for fine-tuning: packed samples attend to less than the entire sequence.
    """
    if run.seconds < LEAST_S:
        step = f"a step of {run.seconds:.3g} s is under a microsecond, less than a kernel launch"
        return f"{step}; specify seconds, or tokens/s/GPU"
    job = run.job
    per_token = job.model.flops_per_token(job.seq, causal=True)
    needed = per_token
    if job.task != "pretrain":
        needed = job.model.flops_per_token(1, causal=True)
    share = float(steptime.mfu(job, run.seconds)) * needed / per_token
    if share <= 1:
        return ""
    rate = job.tokens / run.seconds / job.gpus
    gpu, peak = job.node.gpu.name, job.node.gpu.tflops(job.precision)
    return (
        f"{rate:,.0f} tokens/s/GPU (a step of {run.seconds:.4g} s) need {share * peak:,.0f} TFLOP/s per GPU, but "
        f"the {gpu}'s dense {job.precision} peak is {peak:,.0f}"
    )
