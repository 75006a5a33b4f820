"""Finds duplicate samples by their content, whatever their files, formats and rows."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping

from superpod.data.samples.sample_kinds import Sample
from superpod.errors import UserError


def content(sample: Sample) -> bytes:
    """The content of a sample, without its place and without which turns are trained on."""
    return json.dumps([sample.text, sample.messages, sample.tools], sort_keys=True, default=str).encode()


def digest(content: bytes) -> int:
    """A 64-bit digest: the probability of a collision among a million samples is 3e-8."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


class Distinct:
    """Recognizes samples that the same or an earlier source has given before; takes about 100 bytes per sample."""

    def __init__(self) -> None:
        self._sources: list[tuple[str, set[int]]] = []
        self._repeats: Counter[str] = Counter()

    def start(self, source: str) -> None:
        """Begin with the samples of `source`, the name for messages."""
        self._sources.append((source, set()))
        self._repeats = Counter()

    def is_new(self, content: bytes) -> bool:
        """Whether this content is new; if not, it is counted as a repeat."""
        key = digest(content)
        for name, keys in self._sources:
            if key in keys:
                self._repeats[name] += 1
                return False
        self._sources[-1][1].add(key)
        return True

    def repeats(self) -> dict[str, int]:
        """For each source, how many samples of the current source repeat one of its samples.

        Raises:
            UserError: the current source has only repeats: it is an earlier one under another name.
        """
        name, keys = self._sources[-1]
        if self._repeats and not keys:
            raise UserError(
                f"every sample of {name} is also in {' or '.join(self._repeats)}",
                "leave one of them out: samples to validate on must not be trained on, and NAME:WEIGHT takes those of "
                "a file more often",
            )
        return dict(self._repeats)


def line(source: str, repeats: Mapping[str, int]) -> str:
    """A line for the user on the duplicates that were left out of `source`."""
    places = {name: "repeated in the same source" if name == source else f"also in {name}" for name in repeats}
    counts = ", ".join(f"{count} {places[name]}" for name, count in repeats.items())
    return f"left out {sum(repeats.values())} duplicate samples: {counts}"
