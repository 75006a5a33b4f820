"""What the runs of a rehearsal say when they are held against each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from superpod.rehearsal import agree, fed
from superpod.rehearsal.check import Check
from superpod.rehearsal.forks import FinishedRun

if TYPE_CHECKING:
    from superpod.rehearsal.trial import Trial

FP32_BOUND = 1e-5
"""How far the losses of two layouts may be apart in fp32, relative."""
NORM_BOUND = 1e-4
"""How far the gradients' norms may be apart in fp32, relative."""
SCALE_BOUND = 0.1
"""How far the first gradients' norm in bf16 or fp16 may be from that in fp32, relative."""
BF16_BOUND = 0.03
"""How far losses in bf16 or fp16 may be from one rank's in fp32, relative: rounding, grown over the steps."""
RESUME_BOUND = 1e-6
"""How far a resumed run may be from the one that was not interrupted, relative."""
LEAST_FALL, ADAPTERS_FALL = 0.05, 0.02
"""Share by which the loss must fall in ten steps; adapters leave a random model's embeddings and head as they are."""

LOSSES = ("the forward pass, the weights or the data differ", "the gradients differ", "the optimizer differs")
NORMS = ("the gradients differ", "the optimizer differs", "the optimizer differs")
RESUMED = ("its weights or its data are not those", "its optimizer is not", "its optimizer is not")
"""What it tells that a run is apart from the first step on, from the second, and from a later one."""

LAYERS_ASKED = "Invalid access pattern for ShardedTensor(key='module.decoder.layers"
"""How Megatron's checkpoints say that the stages ask for one layer twice, or for one not at all."""


def of(trial: Trial, steps: int) -> Iterator[Check]:
    """All that can be said of the runs that ended well, and why one did not."""
    well = {name: run for name, run in trial.runs.items() if not run.error}
    for name, run in trial.runs.items():
        if run.error:
            yield Check(f"run {name}", False, _in_words(run.error, trial.shrunk.job.model.layers))
    if "own" not in well:
        return
    own, one = well["own"], well["one"]
    sharp = well.get("fp32", own)
    yield _falls(own, ADAPTERS_FALL if "base" in well else LEAST_FALL)
    yield from _against_one(trial.precision, own, sharp, one)
    yield fed.check(own, one)
    yield agree.layers(own, trial.shrunk.job.model.layers)
    yield _all_took_part(own, steps)
    yield from agree.replicas(own)
    middle = steps // 2
    if "resumed" in well:
        yield _near("resumed", well["resumed"].losses, own.losses[middle:], RESUME_BOUND, RESUMED)
    if "resharded" in well:
        bound = FP32_BOUND if sharp is own else BF16_BOUND
        yield _near("resharded to one rank", well["resharded"].losses, own.losses[middle : middle + 1], bound, RESUMED)


def _in_words(error: str, layers: int) -> str:
    rank, _, why = error.partition(": ")
    if LAYERS_ASKED in why:
        return f"{rank}: the stages do not hold each of {layers} layers once; Megatron says: {why}"
    return error


def _falls(own: FinishedRun, share: float) -> Check:
    first, last, steps = own.losses[0], own.losses[-1], len(own.losses)
    least = share * min(1, steps / 10)
    falls = f"{first:.3f} -> {last:.3f} in {steps} steps, a fall of {100 * least:.1f} % wanted"
    return Check("loss falls", 1 - last / first >= least, falls)


def _against_one(precision: str, own: FinishedRun, sharp: FinishedRun, one: FinishedRun) -> Iterator[Check]:
    """The layout's losses, those in fp32 first, against one rank's."""
    count = len(sharp.losses)
    yield _near("one rank's losses, fp32", sharp.losses, one.losses[:count], FP32_BOUND)
    yield _near("one rank's gradient norms, fp32", sharp.grad_norms, one.grad_norms[:count], NORM_BOUND, NORMS)
    if sharp is not own:
        plain = precision if precision in ("bf16", "fp16") else f"bf16 for {precision}"
        yield _near(f"one rank's losses, {plain}", own.losses, one.losses, BF16_BOUND)
        yield _scale(plain, own.grad_norms[0], one.grad_norms[0])


def _near(name: str, found: list[float], wanted: list[float], bound: float, why: tuple[str, ...] = LOSSES) -> Check:
    if len(found) != len(wanted):
        return Check(name, False, f"{len(found)} steps, not {len(wanted)}")
    apart = [abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True)]
    far = max(apart, key=lambda each: (math.isnan(each), each))
    steps = f"{len(found)} step" + "s" * (len(found) > 1)
    first = next((i for i, each in enumerate(apart) if not each <= bound), None)
    where = "" if first is None else f"; from step {first + 1} on: {why[min(first, 2)]}"
    return Check(name, far <= bound, f"{far:.1e} apart over {steps}, {bound:.0e} allowed{where}")


def _scale(precision: str, found: float, wanted: float) -> Check:
    """Whether the gradients are as long as in fp32: a loss scale that is applied on one side only is found so."""
    said = f"{found:.3g}, and {wanted:.3g} in fp32"
    return Check(f"gradients' scale, {precision}", abs(found - wanted) <= SCALE_BOUND * wanted, said)


def _all_took_part(own: FinishedRun, steps: int) -> Check:
    idle = [rank for rank, seen in enumerate(own.ranks) if len(seen["losses"]) != steps or not agree.moved(seen)]
    if idle:
        return Check("every rank took part", False, f"ranks {', '.join(map(str, idle))} learnt nothing")
    return Check("every rank took part", True, f"{len(own.ranks)} ranks trained parameters in {steps} steps")
