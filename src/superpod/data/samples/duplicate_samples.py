"""Find samples with the same content, independent of file, format and row."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping

from superpod.data.samples.sample_kinds import Sample
from superpod.errors import UserError


def serialize_content(sample: Sample) -> bytes:
    """Return the text, messages and tools of a sample as bytes."""
    return json.dumps([sample.text, sample.messages, sample.tools], sort_keys=True, default=str).encode()


def digest(content: bytes) -> int:
    """Return a 64-bit digest. The probability of a collision among a million samples is 3e-8."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


class DistinctSamples:
    """Detects samples that already occurred in the same or an earlier source. Uses about 100 bytes per sample."""

    def __init__(self) -> None:
        self._sources: list[tuple[str, set[int]]] = []
        self._repeats: Counter[str] = Counter()

    def start(self, source: str) -> None:
        """Start a new source; `source` is its name for messages."""
        self._sources.append((source, set()))
        self._repeats = Counter()

    def is_new(self, content: bytes) -> bool:
        """Return whether the content of a sample is new; if not, count it as a repetition."""
        key = digest(content)
        for name, keys in self._sources:
            if key in keys:
                self._repeats[name] += 1
                return False
        self._sources[-1][1].add(key)
        return True

    def count_repeats(self) -> dict[str, int]:
        """Return the repetitions in the current source by repeated source. Raises UserError if all samples repeat."""
        name, keys = self._sources[-1]
        if self._repeats and not keys:
            raise UserError(
                f"every sample of {name} is also in {' or '.join(self._repeats)}",
                "remove one of them; validation samples must not be used for training, and NAME:WEIGHT repeats the "
                "samples of a file",
            )
        return dict(self._repeats)


def describe_removed(source: str, repeats: Mapping[str, int]) -> str:
    """Return a message about the duplicates removed from `source`; `repeats` counts them by the source they repeat."""
    places = {name: "repeated in the same source" if name == source else f"also in {name}" for name in repeats}
    counts = ", ".join(f"{count} {places[name]}" for name, count in repeats.items())
    return f"removed {sum(repeats.values())} duplicate samples: {counts}"
