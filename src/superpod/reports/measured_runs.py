"""Measurements of finished runs for calibration: the job in plan.json, and the median step time."""

from __future__ import annotations

from superpod.errors import UserError, counted
from superpod.planner import columns
from superpod.planner.calibration.calibrate import MeasuredRun
from superpod.planner.timing import steptime
from superpod.reports import report
from superpod.reports.runs.run_plan import planned_job
from superpod.runtime.runs.run_folder import RunFolder

MIN_STEP_S = 1e-6
"""Minimum step time. A kernel launch takes longer, so a shorter time is a typo, or in another unit."""
MIN_STEPS = 3
"""Minimum number of steps after the first for measuring the step time."""
MAX_TIMES_PLANNED = 200
"""Maximum ratio of measured and planned step time. A longer time is a typo, or in another unit."""


def measure_run(run: RunFolder) -> MeasuredRun:
    """Return the measurement of a finished run. Raises UserError if it ran on CPUs, or cannot be compared."""
    summary = report.summary(run)
    if summary.rehearsal:
        raise UserError(f"{run.path} is a rehearsal: it ran on CPUs", "pass runs that used GPUs")
    rate = summary.tokens_per_s_per_gpu
    if rate is None or summary.steps < MIN_STEPS:
        steps = counted(summary.steps, "measured step")
        raise UserError(f"{run.path} has {steps}; at least {MIN_STEPS} are required", "pass longer runs")
    job = planned_job(run)
    measurement = MeasuredRun(run.path.name, job, job.tokens / rate / job.gpus, summary.peak_allocated_gib)
    problem = explain_impossible(measurement)
    if problem:
        raise UserError(
            f"{run.path}: {problem}", "its plan.json and metrics.jsonl belong to different jobs, or were edited"
        )
    return measurement


def explain_impossible(run: MeasuredRun) -> str:
    """Return why a measurement is impossible, or "" if it is possible.

    Reasons are an illegal layout, more memory than that of the GPU, a rate above its peak, and an implausible step
    time.
    """
    try:
        columns.from_job(run.job)
    except UserError as error:
        return str(error)
    return _describe_excess_memory(run) or _describe_excess_time(run) or _describe_excess_speed(run)


def _describe_excess_memory(run: MeasuredRun) -> str:
    """Describe memory peaks that exceed the memory of the GPU; "" if there are none."""
    gpu = run.job.node.gpu
    peaks = {"allocated": run.allocated_gib, "reserved": run.reserved_gib}
    over = [f"{size:,.5g} GiB {what}" for what, size in peaks.items() if size is not None and size > gpu.hbm_usable_gib]
    if not over:
        return ""
    capacity_text = f"the {gpu.name} has {gpu.hbm_usable_gib:g} GiB"
    return f"{' and '.join(over)}, but {capacity_text}; specify the peak of one GPU, in GiB"


def _describe_excess_time(run: MeasuredRun) -> str:
    """Describe a step time that exceeds the planned one by far; "" if it does not."""
    expected = float(steptime.step(run.job, columns.from_job(run.job)).seconds)
    if run.seconds <= MAX_TIMES_PLANNED * expected:
        return ""
    return f"a step of {run.seconds:.4g} s is over {MAX_TIMES_PLANNED:,} times the planned {expected:.4g} s"


def _describe_excess_speed(run: MeasuredRun) -> str:
    """Describe a step shorter than a kernel launch, or a rate above the peak of the GPU; "" if there is none.

    The FLOPs of fine-tuning exclude attention, because packed samples attend only to themselves.
    """
    if run.seconds < MIN_STEP_S:
        step = f"a step of {run.seconds:.3g} s is under a microsecond, less than a kernel launch"
        return f"{step}; specify seconds, or tokens/s/GPU"
    job = run.job
    per_token = job.model.flops_per_token(job.seq, causal=True)
    needed_flops = per_token
    if job.task != "pretrain":
        needed_flops = job.model.flops_per_token(1, causal=True)
    share = float(steptime.mfu(job, run.seconds)) * needed_flops / per_token
    if share <= 1:
        return ""
    rate = job.tokens / run.seconds / job.gpus
    gpu, peak = job.node.gpu.name, job.node.gpu.tflops(job.precision)
    return (
        f"{rate:,.0f} tokens/s/GPU (a step of {run.seconds:.4g} s) need {share * peak:,.0f} TFLOP/s per GPU, but "
        f"the dense {job.precision} peak of the {gpu} is {peak:,.0f}"
    )
