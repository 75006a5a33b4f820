"""Mix sources of samples by weight, and hold out samples for validation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from superpod.errors import UserError

T = TypeVar("T")
MAX_EPOCH_RATIO = 100
"""Maximum ratio of samples in an epoch, with repetitions, to distinct samples. More indicates wrong weights."""


@dataclass(frozen=True)
class SourceShare:
    """A source in an epoch: its distinct `samples`, samples `taken` with repetitions, and its `share` of the epoch."""

    samples: int
    taken: int
    share: float


def compute_epoch(samples: Sequence[int], weights: Sequence[float]) -> list[SourceShare]:
    """Return the number of samples per source in an epoch that contains every sample at least once.

    The shares of the sources are proportional to the weights, so the source with the most samples per weight is taken
    once, and the others are repeated. Without weights, every sample is taken once.

    Args:
        samples: number of samples per source, at least 1.
        weights: weight per source, or empty.

    Raises:
        UserError: the epoch would have more than `MAX_EPOCH_RATIO` times as many samples as the sources.
    """
    if not weights:
        return [SourceShare(count, count, count / sum(samples)) for count in samples]
    shares = [weight / sum(weights) for weight in weights]
    epoch = max(count / share if share else float("inf") for count, share in zip(samples, shares, strict=True))
    if epoch > MAX_EPOCH_RATIO * sum(samples):
        raise UserError(
            f"weights {', '.join(f'{weight:g}' for weight in weights)} for {', '.join(map(str, samples))} samples: "
            f"an epoch that contains every sample has {epoch:.3g} samples, over {MAX_EPOCH_RATIO} times as many",
            "choose weights closer to the sizes of the files, or shorten the file with the small weight",
        )
    taken_counts = [max(count, round(epoch * share)) for count, share in zip(samples, shares, strict=True)]
    return [SourceShare(count, n, n / sum(taken_counts)) for count, n in zip(samples, taken_counts, strict=True)]


def split_into_rounds(sources: Sequence[Sequence[T]], mix: Sequence[SourceShare], seed: int) -> list[list[T]]:
    """Divide an epoch into rounds in which no sample is repeated, and return the samples of each round.

    A source that is taken 2.5 times is in the first two rounds; half of its samples, drawn with `seed`, are in the
    third. If each round is packed separately, no sequence contains a sample twice.

    Args:
        sources: samples per source.
        mix: share of each source in the epoch.
        seed: seed of the random draw.
    """
    result: list[list[T]] = []
    for at, (samples, part) in enumerate(zip(sources, mix, strict=True)):
        complete, rest = divmod(part.taken, part.samples)
        repetitions: list[Sequence[T]] = [samples for _ in range(complete)]
        if rest:
            drawn_samples = sorted(random.Random(f"{seed} {at}").sample(range(part.samples), rest))
            repetitions.append([samples[index] for index in drawn_samples])
        for number, repetition in enumerate(repetitions):
            if number == len(result):
                result.append([])
            result[number] += repetition
    return result


def hold_out(sources: Sequence[Sequence[T]], share: float, seed: int) -> tuple[list[list[T]], list[T]]:
    """Split samples at random into training samples per source, and validation samples of all sources.

    The validation samples are `share` of each source, and at least one in total.

    Raises:
        UserError: `share` is not between 0 and 1, or no source has two samples.
    """
    if not 0 < share < 1:
        raise UserError(f"--validation {share} must be between 0 and 1", "0.05 holds out 5 % of the samples")
    if sum(map(len, sources)) < 2 or max(map(len, sources)) < 2:
        raise UserError("a single sample cannot be split into training and validation", "add samples")
    counts = [min(len(samples) - 1, round(share * len(samples))) for samples in sources]
    if not any(counts):
        largest_source = max(range(len(sources)), key=lambda at: len(sources[at]))
        counts[largest_source] = 1
    training: list[list[T]] = []
    validation: list[T] = []
    for at, (samples, count) in enumerate(zip(sources, counts, strict=True)):
        order = list(range(len(samples)))
        random.Random(seed if not at else f"{seed} {at}").shuffle(order)
        chosen_samples = set(order[:count])
        training.append([sample for index, sample in enumerate(samples) if index not in chosen_samples])
        validation += [sample for index, sample in enumerate(samples) if index in chosen_samples]
    return training, validation
