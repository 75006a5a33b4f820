"""Compares losses, gradient norms, inputs and parameters of a rehearsal's runs, with a tolerance per comparison."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from superpod.common.units import format_ranks
from superpod.errors import counted
from superpod.rehearsal.comparison import CheckResult, data_check, replica_check
from superpod.rehearsal.training.forked_run import FinishedRun

if TYPE_CHECKING:
    from superpod.rehearsal.rehearsal_run import Rehearsal

# All tolerances are relative differences.
FP32_TOLERANCE = 1e-5
"""Maximum difference between the losses of two layouts in FP32."""
NORM_TOLERANCE = 1e-4
"""Maximum difference between the gradient norms of two layouts in FP32."""
SCALE_TOLERANCE = 0.1
"""Maximum difference between the first gradient norms in BF16 or FP16 and in FP32."""
BF16_TOLERANCE = 0.03
"""Maximum difference between the losses in BF16 or FP16 and in FP32: rounding errors accumulate over the steps."""
RESUME_TOLERANCE = 1e-6
"""Maximum difference between the losses of a resumed and an uninterrupted run."""
DROPOUT_TOLERANCE = 0.1
"""Maximum difference between the first losses with and without dropout, whose masks add noise before any training."""
LOSS_DECREASE, ADAPTERS_LOSS_DECREASE = 0.05, 0.02
"""Required relative decrease of the loss in ten steps; smaller with adapters, where the embeddings stay random."""

# The probable cause of a difference that starts at the first step, at the second step, or later.
LOSS_CAUSES = ("the forward pass, the weights or the data differ", "the gradients differ", "the optimizer differs")
NORM_CAUSES = ("the gradients differ", "the optimizer differs", "the optimizer differs")
RESUME_CAUSES = (
    "weights or data were not restored",
    "the optimizer was not restored",
    "the optimizer was not restored",
)

LAYERS_NOT_ONCE = "Invalid access pattern for ShardedTensor(key='module.decoder.layers"
"""Start of Megatron's message if the stages load a layer twice or not at all."""


def compare_runs(rehearsal: Rehearsal, steps: int) -> Iterator[CheckResult]:
    """Yield every check that is possible with the finished runs, and a failed check for each run with an error."""
    finished_runs = {name: run for name, run in rehearsal.runs.items() if not run.error}
    layers = rehearsal.shrunk.job.model.layers
    for name, run in rehearsal.runs.items():
        if run.error:
            yield CheckResult(f"run {name}", False, _explain_error(run.error, layers))
    if "own" not in finished_runs:
        return

    own, one = finished_runs["own"], finished_runs["one"]
    fp32 = finished_runs.get("fp32", own)  # for a recipe in fp32, the run `own` is also the run in fp32
    decrease = ADAPTERS_LOSS_DECREASE if "base" in finished_runs else LOSS_DECREASE
    yield _check_decrease(own, decrease)
    yield from _compare_with_one_rank(rehearsal.precision, own, fp32, one)
    yield data_check.check_samples(own, one)
    yield replica_check.check_layers(own, layers)
    yield _check_participation(own, steps)
    yield from replica_check.check_replicas(own)

    half_steps = steps // 2
    if "resumed" in finished_runs:
        yield _compare(
            "resumed", finished_runs["resumed"].losses, own.losses[half_steps:], RESUME_TOLERANCE, RESUME_CAUSES
        )
    if "resharded" in finished_runs:
        tolerance = FP32_TOLERANCE if fp32 is own else BF16_TOLERANCE
        losses = finished_runs["resharded"].losses
        expected = own.losses[half_steps : half_steps + len(losses)]
        yield _compare("resharded to one rank", losses, expected, tolerance, RESUME_CAUSES)
    if "dropout" in finished_runs:
        dropout = finished_runs["dropout"]
        yield _compare_dropout(rehearsal.dropouts, dropout, own)
        checks = (
            _check_decrease(dropout, decrease / 2),
            _check_participation(dropout, steps),
            *replica_check.check_replicas(dropout),
        )
        for check in checks:
            yield replace(check, name=f"{check.name}, with dropout")


def _compare_dropout(dropouts: dict[str, float], dropout: FinishedRun, own_run: FinishedRun) -> CheckResult:
    """Check that dropout changes the losses of the run `own`, but the first loss by at most `DROPOUT_TOLERANCE`."""
    name = "dropout is noise"
    shares = ", ".join(f"{path.rpartition('.')[2]} {share:g}" for path, share in dropouts.items())
    if dropout.losses == own_run.losses:
        return CheckResult(name, False, f"{shares} did not change any loss")
    first, without = dropout.losses[0], own_run.losses[0]
    is_passed = abs(first - without) / abs(without) <= DROPOUT_TOLERANCE
    message = f"{shares}: first loss {first:.4f}, without dropout {without:.4f}; {DROPOUT_TOLERANCE:.0%} allowed"
    return CheckResult(name, is_passed, message)


def _explain_error(error: str, layers: int) -> str:
    """Return the error of a run, with an explanation if the stages do not hold each layer once."""
    rank, _, reason = error.partition(": ")
    if LAYERS_NOT_ONCE in reason:
        return f"{rank}: the stages do not contain each of {layers} layers exactly once; Megatron's message: {reason}"
    return error


def _check_decrease(run: FinishedRun, decrease: float) -> CheckResult:
    """Check that the loss of a run decreases by at least `decrease` (relative) in ten steps; by less in fewer steps."""
    first, last, steps = run.losses[0], run.losses[-1], len(run.losses)
    required_decrease = decrease * min(1, steps / 10)
    message = f"{first:.3f} -> {last:.3f} in {steps} steps; required decrease {100 * required_decrease:.1f} %"
    return CheckResult("loss falls", 1 - last / first >= required_decrease, message)


def _compare_with_one_rank(
    precision: str, own_run: FinishedRun, fp32: FinishedRun, one_rank_run: FinishedRun
) -> Iterator[CheckResult]:
    """Compare the layout in fp32, then in its own precision, with one rank in fp32."""
    count = len(fp32.losses)
    yield _compare("one rank's losses, fp32", fp32.losses, one_rank_run.losses[:count], FP32_TOLERANCE)
    norms = one_rank_run.grad_norms[:count]
    yield _compare("one rank's gradient norms, fp32", fp32.grad_norms, norms, NORM_TOLERANCE, NORM_CAUSES)
    if fp32 is own_run:
        return
    computed_in = precision if precision in ("bf16", "fp16") else f"bf16 for {precision}"
    yield _compare(f"one rank's losses, {computed_in}", own_run.losses, one_rank_run.losses, BF16_TOLERANCE)

    # A loss scale that is applied but not removed, or vice versa, changes the norm of the gradients.
    norm, expected = own_run.grad_norms[0], one_rank_run.grad_norms[0]
    is_passed = abs(norm - expected) <= SCALE_TOLERANCE * expected
    yield CheckResult(f"gradients' scale, {computed_in}", is_passed, f"norm {norm:.3g}, in fp32 {expected:.3g}")


def _compare(
    name: str, values: list[float], expected: list[float], tolerance: float, causes: tuple[str, ...] = LOSS_CAUSES
) -> CheckResult:
    """Check that the values of all steps are as expected; `causes` explain a difference from step 1, 2 or 3 on."""
    if len(values) != len(expected):
        return CheckResult(name, False, f"{len(values)} steps instead of {len(expected)}")
    differences = [abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True)]
    largest_difference = max(differences, key=lambda difference: (math.isnan(difference), difference))
    message = (
        f"relative difference {largest_difference:.1e} over {counted(len(values), 'step')}, {tolerance:.0e} allowed"
    )
    # `not <=` instead of `>`, so that NaN exceeds the tolerance.
    for i, difference in enumerate(differences):
        if not difference <= tolerance:
            message += f"; from step {i + 1} on: {causes[min(i, 2)]}"
            break
    return CheckResult(name, largest_difference <= tolerance, message)


def _check_participation(run: FinishedRun, steps: int) -> CheckResult:
    """Check that every rank trained for all steps and changed parameters."""
    idle_ranks = [
        rank
        for rank, record in enumerate(run.ranks)
        if len(record["losses"]) != steps or not replica_check.find_changed_parameters(record)
    ]
    if idle_ranks:
        return CheckResult("every rank took part", False, f"{format_ranks(idle_ranks)} did not train")
    return CheckResult("every rank took part", True, f"{len(run.ranks)} ranks trained parameters in {steps} steps")
