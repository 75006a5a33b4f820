"""Finished runs as measurements: the job that plan.json describes, and the median of its steps."""

from __future__ import annotations

from superpod.errors import UserError
from superpod.planner import columns
from superpod.planner.calibration.calibrate import MeasuredRun
from superpod.planner.timing import steptime
from superpod.reports import report
from superpod.reports.runs.run_plan import planned_job
from superpod.runtime.runs.run_folder import RunFolder

LEAST_S = 1e-6
"""A kernel takes longer to start; a step in less is a slip of the pen, or of the unit."""
LEAST_STEPS = 3
"""Steps after the first; fewer say little of how long a step takes."""
MOST_TIMES_PLANNED = 200
"""A step that takes longer than so many planned ones is a slip of the pen, or of the unit."""


def measure_run(run: RunFolder) -> MeasuredRun:
    """What a run measured.

    Raises:
        UserError: it ran on CPUs, has too few steps, or its plan names what the planner does not know.
    """
    summary = report.summary(run)
    if summary.rehearsal:
        raise UserError(f"{run.path} is a rehearsal: it ran on CPUs", "name runs on GPUs")
    rate = summary.tokens_per_s_per_gpu
    if rate is None or summary.steps < LEAST_STEPS:
        raise UserError(f"{run.path} has {summary.steps} measured steps", f"name runs of {LEAST_STEPS} steps or more")
    job = planned_job(run)
    one = MeasuredRun(run.path.name, job, job.tokens / rate / job.gpus, summary.peak_allocated_gib)
    if wrong := find_contradiction(one):
        raise UserError(f"{run.path}: {wrong}", "its plan.json and metrics.jsonl are of two jobs, or were edited")
    return one


def find_contradiction(run: MeasuredRun) -> str:
    """Why no GPU has measured this: a layout that cannot be, more memory than it has, a rate above its peak, or a step
    of another kind; '' where one may have.
    """
    try:
        columns.from_job(run.job)
    except UserError as error:
        return str(error)
    return _too_large(run) or _too_slow(run) or _too_fast(run)


def _too_large(run: MeasuredRun) -> str:
    """What a run says that it held, where its GPU has less."""
    gpu = run.job.node.gpu
    peaks = {"allocated": run.allocated_gib, "reserved": run.reserved_gib}
    over = [f"{size:,.5g} GiB {what}" for what, size in peaks.items() if size is not None and size > gpu.hbm_usable_gib]
    if not over:
        return ""
    has = f"the {gpu.name} has {gpu.hbm_usable_gib:g} GiB"
    return f"{' and '.join(over)}, and {has}; write the peak of one GPU, in GiB"


def _too_slow(run: MeasuredRun) -> str:
    expected = float(steptime.step(run.job, columns.from_job(run.job)).seconds)
    if run.seconds <= MOST_TIMES_PLANNED * expected:
        return ""
    return f"a step of {run.seconds:.4g} s is over {MOST_TIMES_PLANNED:,} times the {expected:.4g} s that are planned"


def _too_fast(run: MeasuredRun) -> str:
    """Attention of a fine-tuning is not counted: samples that are packed attend to less than the whole sequence."""
    if run.seconds < LEAST_S:
        step = f"a step of {run.seconds:.3g} s is under a microsecond, in which no kernel even starts"
        return f"{step}; write its seconds, or tokens a second and GPU"
    job = run.job
    per_token = job.model.flops_per_token(job.seq, causal=True)
    needed = job.model.flops_per_token(1, causal=True) if job.task != "pretrain" else per_token
    share = float(steptime.mfu(job, run.seconds)) * needed / per_token
    if share <= 1:
        return ""
    rate = job.tokens / run.seconds / job.gpus
    gpu, peak = job.node.gpu.name, job.node.gpu.tflops(job.precision)
    return (
        f"{rate:,.0f} tokens/s/GPU (a step of {run.seconds:.4g} s) need {share * peak:,.0f} TFLOP/s of a GPU, and "
        f"the {gpu}'s dense {job.precision} peak is {peak:,.0f}"
    )
