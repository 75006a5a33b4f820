"""Mix sources of samples by weight, and hold out samples for validation."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from superpod.errors import UserError

T = TypeVar("T")
MAX_EPOCH_RATIO = 100
"""Maximum ratio of samples in an epoch to distinct samples; a larger ratio indicates wrong weights."""


@dataclass(frozen=True)
class Part:
    """A source in an epoch: its number of `samples`, how many are `taken` with repetitions, and its `share`."""

    samples: int
    taken: int
    share: float


def parts(samples: Sequence[int], weights: Sequence[float]) -> list[Part]:
    """Compute the number of samples per source in an epoch, with shares proportional to the weights.

    No sample is left out: the source with the most samples per weight is taken once, the others are repeated. Without
    weights, every sample is taken once. Every source must have a sample.

    Raises:
        UserError: an epoch would have more than `MAX_EPOCH_RATIO` times as many samples as there are.
    """
    if not weights:
        return [Part(count, count, count / sum(samples)) for count in samples]
    shares = [weight / sum(weights) for weight in weights]
    epoch = max(count / share if share else float("inf") for count, share in zip(samples, shares, strict=True))
    if epoch > MAX_EPOCH_RATIO * sum(samples):
        raise UserError(
            f"weights {', '.join(f'{weight:g}' for weight in weights)} for {', '.join(map(str, samples))} samples make "
            f"an epoch of {epoch:.3g} samples, because no sample is left out",
            "use weights closer to the sizes of the files, or fewer samples in the file with the small weight",
        )
    taken_counts = [max(count, round(epoch * share)) for count, share in zip(samples, shares, strict=True)]
    return [Part(count, n, n / sum(taken_counts)) for count, n in zip(samples, taken_counts, strict=True)]


def rounds(sources: Sequence[Sequence[T]], mix: Sequence[Part], seed: int) -> list[list[T]]:
    """Divide an epoch into rounds without repeated samples: all samples, the first repetitions, the second, and so on.

    An incomplete repetition is drawn at random with `seed`. If each round is packed separately, no sequence contains a
    sample twice.
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
    """Return the training samples of each source, and the validation samples: a `share` of each, at least one in all.

    Raises:
        UserError: the share is not between 0 and 1, or there is only one sample.
    """
    if not 0 < share < 1:
        raise UserError(f"--validation {share} must be between 0 and 1", "0.05 holds out 5 % of the samples")
    if sum(map(len, sources)) < 2 or max(map(len, sources)) < 2:
        raise UserError("one sample cannot be split into training and validation", "add samples")
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
