"""How much of an epoch each source of samples makes up, and which samples are held out of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from superpod.errors import UserError

T = TypeVar("T")
MOST_TIMES = 100
"""An epoch has at most so many samples for one that was given: more is a mistake in the weights."""


@dataclass(frozen=True)
class Part:
    """A source in an epoch: `taken` of its `samples`, repeats counted, which is `share` of the epoch."""

    samples: int
    taken: int
    share: float


def parts(samples: Sequence[int], weights: Sequence[float]) -> list[Part]:
    """How often the samples of every source are taken in an epoch, so that its shares are as the weights are.

    No sample is left out: the source with the most samples for its weight is taken once, the others are repeated.
    Without weights every sample is taken once. All sources have a sample.

    Raises:
        UserError: the weights would repeat samples so often that an epoch has more than `MOST_TIMES` as many.
    """
    if not weights:
        return [Part(count, count, count / sum(samples)) for count in samples]
    shares = [weight / sum(weights) for weight in weights]
    epoch = max(count / share if share else float("inf") for count, share in zip(samples, shares, strict=True))
    if epoch > MOST_TIMES * sum(samples):
        raise UserError(
            f"weights {', '.join(f'{weight:g}' for weight in weights)} for {', '.join(map(str, samples))} samples make "
            f"an epoch of {epoch:.3g}, because no sample is left out",
            "weights closer to the files' sizes, or fewer samples in the file of little weight",
        )
    taken = [max(count, round(epoch * share)) for count, share in zip(samples, shares, strict=True)]
    return [Part(count, n, n / sum(taken)) for count, n in zip(samples, taken, strict=True)]


def rounds(sources: Sequence[Sequence[T]], mix: Sequence[Part], seed: int) -> list[list[T]]:
    """An epoch as lists in which no sample stands twice: all samples, then those repeated once, twice, and so on.

    What is left of a whole repetition is drawn by `seed`. Packed by round, no sequence holds a sample twice.
    """
    made: list[list[T]] = []
    for at, (samples, part) in enumerate(zip(sources, mix, strict=True)):
        whole, rest = divmod(part.taken, part.samples)
        drawn = sorted(random.Random(f"{seed} {at}").sample(range(part.samples), rest))
        for number in range(whole + bool(rest)):
            if number == len(made):
                made.append([])
            made[number] += samples if number < whole else [samples[place] for place in drawn]
    return made


def hold_out(sources: Sequence[Sequence[T]], share: float, seed: int) -> tuple[list[list[T]], list[T]]:
    """The samples of every source to train on, and the `share` of each held out for validation; at least one in all.

    Raises:
        UserError: a share outside (0, 1), or a single sample.
    """
    if not 0 < share < 1:
        raise UserError(f"--validation {share} is not a share between 0 and 1", "0.05 holds out a twentieth")
    if sum(map(len, sources)) < 2 or max(map(len, sources)) < 2:
        raise UserError("one sample cannot be split into training and validation", "give more samples")
    largest = max(range(len(sources)), key=lambda at: len(sources[at]))
    counts = [min(len(samples) - 1, round(share * len(samples))) for samples in sources]
    counts[largest] = counts[largest] if any(counts) else 1
    training: list[list[T]] = []
    held: list[T] = []
    for at, (samples, count) in enumerate(zip(sources, counts, strict=True)):
        order = list(range(len(samples)))
        random.Random(seed if not at else f"{seed} {at}").shuffle(order)
        out = set(order[:count])
        training.append([sample for place, sample in enumerate(samples) if place not in out])
        held += [sample for place, sample in enumerate(samples) if place in out]
    return training, held
