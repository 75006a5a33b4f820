"""Judges a rehearsal: compares its runs with each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from superpod.rehearsal.check_result import CheckResult
from superpod.rehearsal.comparison import data_check, replica_check
from superpod.rehearsal.training.forked_run import FinishedRun

if TYPE_CHECKING:
    from superpod.rehearsal.trial import Trial

# All bounds are relative differences.
FP32_BOUND = 1e-5
"""Between the losses of two layouts in fp32."""
NORM_BOUND = 1e-4
"""Between the norms of their gradients in fp32."""
SCALE_BOUND = 0.1
"""Between the first norm of the gradients in bf16 or fp16 and that in fp32."""
BF16_BOUND = 0.03
"""Between losses in bf16 or fp16 and those of one rank in fp32: rounding, which grows over the steps."""
RESUME_BOUND = 1e-6
"""Between the losses of a resumed run and those of the uninterrupted one."""
DROPOUT_BOUND = 0.1
"""Between the first loss with dropout and that without: masks add noise, and nothing is learnt yet."""
LEAST_FALL, ADAPTERS_FALL = 0.05, 0.02
"""Share by which the loss must fall in ten steps. Adapters learn less: a random model's embeddings stay random."""

# What a difference that begins at the first step, at the second, or at a later one tells.
LOSSES = ("the forward pass, the weights or the data differ", "the gradients differ", "the optimizer differs")
NORMS = ("the gradients differ", "the optimizer differs", "the optimizer differs")
RESUMED = ("its weights or its data are not those", "its optimizer is not", "its optimizer is not")

LAYERS_NOT_ONCE = "Invalid access pattern for ShardedTensor(key='module.decoder.layers"
"""Start of Megatron's message when the stages load one layer twice, or one not at all."""


def checks(trial: Trial, steps: int) -> Iterator[CheckResult]:
    """Every check that the finished runs allow, and a failed one for each run that broke."""
    finished = {name: run for name, run in trial.runs.items() if not run.error}
    layers = trial.shrunk.job.model.layers
    for name, run in trial.runs.items():
        if run.error:
            yield CheckResult(f"run {name}", False, _explained(run.error, layers))
    if "own" not in finished:
        return
    own, one = finished["own"], finished["one"]
    fp32 = finished.get("fp32", own)  # a recipe in fp32 has no such run beside its own
    yield _falls(own, ADAPTERS_FALL if "base" in finished else LEAST_FALL)
    yield from _against_one(trial.precision, own, fp32, one)
    yield data_check.check(own, one)
    yield replica_check.layers(own, layers)
    yield _all_took_part(own, steps)
    yield from replica_check.replicas(own)
    middle = steps // 2
    if "resumed" in finished:
        yield _close("resumed", finished["resumed"].losses, own.losses[middle:], RESUME_BOUND, RESUMED)
    if "resharded" in finished:
        bound = FP32_BOUND if fp32 is own else BF16_BOUND
        losses = finished["resharded"].losses
        yield _close("resharded to one rank", losses, own.losses[middle : middle + len(losses)], bound, RESUMED)
    if "dropout" in finished:
        yield from _with_dropout(trial, finished["dropout"], own, steps)


def _with_dropout(trial: Trial, dropout: FinishedRun, own: FinishedRun, steps: int) -> Iterator[CheckResult]:
    """The layout with its dropout: it works, it is no more than noise, the model learns, and replicas agree."""
    shares = ", ".join(f"{path.rpartition('.')[2]} {share:g}" for path, share in trial.dropouts.items())
    first, plain = dropout.losses[0], own.losses[0]
    difference = abs(first - plain) / abs(plain)
    message = f"{shares}: the first loss is {first:.4f}, and {plain:.4f} without; {DROPOUT_BOUND:.0%} allowed"
    works = dropout.losses != own.losses
    yield CheckResult(
        "dropout is noise", works and difference <= DROPOUT_BOUND, message if works else f"{shares} changed no loss"
    )
    fall = _falls(dropout, (ADAPTERS_FALL if "base" in trial.runs else LEAST_FALL) / 2)
    part = _all_took_part(dropout, steps)
    for check in (fall, part, *replica_check.replicas(dropout)):
        yield replace(check, name=f"{check.name}, with dropout")


def _explained(error: str, layers: int) -> str:
    rank, _, reason = error.partition(": ")
    if LAYERS_NOT_ONCE in reason:
        return f"{rank}: the stages do not hold each of {layers} layers once; Megatron says: {reason}"
    return error


def _falls(own: FinishedRun, share: float) -> CheckResult:
    first, last, steps = own.losses[0], own.losses[-1], len(own.losses)
    least = share * min(1, steps / 10)
    message = f"{first:.3f} -> {last:.3f} in {steps} steps; it must fall by {100 * least:.1f} %"
    return CheckResult("loss falls", 1 - last / first >= least, message)


def _against_one(precision: str, own: FinishedRun, fp32: FinishedRun, one: FinishedRun) -> Iterator[CheckResult]:
    """Compare the layout in fp32, then in its own precision, with one rank in fp32."""
    count = len(fp32.losses)
    yield _close("one rank's losses, fp32", fp32.losses, one.losses[:count], FP32_BOUND)
    yield _close("one rank's gradient norms, fp32", fp32.grad_norms, one.grad_norms[:count], NORM_BOUND, NORMS)
    if fp32 is not own:
        computed_in = precision if precision in ("bf16", "fp16") else f"bf16 for {precision}"
        yield _close(f"one rank's losses, {computed_in}", own.losses, one.losses, BF16_BOUND)
        yield _scale(computed_in, own.grad_norms[0], one.grad_norms[0])


def _close(
    name: str, values: list[float], expected: list[float], bound: float, causes: tuple[str, ...] = LOSSES
) -> CheckResult:
    if len(values) != len(expected):
        return CheckResult(name, False, f"{len(values)} steps, not {len(expected)}")
    differences = [abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True)]
    largest = max(differences, key=lambda difference: (math.isnan(difference), difference))
    steps = f"{len(values)} step" + "s" * (len(values) > 1)
    # `not <=` and not `>`, so that NaN counts as beyond the bound.
    first = next((i for i, difference in enumerate(differences) if not difference <= bound), None)
    cause = "" if first is None else f"; from step {first + 1} on: {causes[min(first, 2)]}"
    message = f"relative difference {largest:.1e} over {steps}, {bound:.0e} allowed{cause}"
    return CheckResult(name, largest <= bound, message)


def _scale(precision: str, norm: float, expected: float) -> CheckResult:
    """Compare the gradients' length with fp32: this shows a loss scale that only one side applies."""
    message = f"{norm:.3g}, and {expected:.3g} in fp32"
    return CheckResult(f"gradients' scale, {precision}", abs(norm - expected) <= SCALE_BOUND * expected, message)


def _all_took_part(own: FinishedRun, steps: int) -> CheckResult:
    idle = [
        rank
        for rank, record in enumerate(own.ranks)
        if len(record["losses"]) != steps or not replica_check.changed_parameters(record)
    ]
    if idle:
        return CheckResult("every rank took part", False, f"ranks {', '.join(map(str, idle))} learnt nothing")
    return CheckResult("every rank took part", True, f"{len(own.ranks)} ranks trained parameters in {steps} steps")
