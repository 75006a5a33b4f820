"""Fine-tuning data as users bring it, read as a stream: the samples of files, and the lines that are none."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from superpod.data.readers import paths, rows
from superpod.data.samples import sample_kinds
from superpod.data.samples.sample_kinds import HINT, KINDS, Keys, Sample
from superpod.errors import UserError

__all__ = ["BadLines", "Reading", "Sample", "read", "stream"]

SHOWN = 3
"""How many wrong lines a message names; it counts the others."""
ENOUGH = 1000
"""So many wrong lines end the reading of a file that may have none."""
SKIPPED = "skipped.jsonl"
"""The file beside the data that takes the lines that were left out."""
MAX_BAD_SHARE = 0.05
"""Share of bad lines beyond which a file is more likely misunderstood than spoilt."""


@dataclass(frozen=True)
class Reading:
    """How files of samples are read; `keys` are NAME=KEY, `system` begins chats without a system message."""

    keys: tuple[str, ...] = ()
    skip: bool = False
    max_bad_share: float = MAX_BAD_SHARE
    system: str = ""

    def check(self) -> None:
        """UserError for an option that means nothing."""
        Keys(self.keys)
        if not 0 <= self.max_bad_share <= 1:
            raise UserError(f"--max-bad-share {self.max_bad_share} is not a share from 0 to 1", "0.05 is one in twenty")
        if self.system and not self.system.isascii():
            try:
                self.system.encode()
            except UnicodeEncodeError:
                raise UserError("--system is not UTF-8", "type it anew") from None


DEFAULT = Reading()


@dataclass
class BadLines:
    """The lines of some files that are no samples. With `skip` they are left out, up to a share, else refused.

    `keep` is a file that takes them, a JSON object each: file, line, reason and text.
    """

    reading: Reading = DEFAULT
    keep: Path | None = None
    count: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    _shown: list[str] = field(default_factory=list)

    def add(self, file: str, line: int, reason: str, text: str) -> None:
        """Note a bad line; UserError when there are `ENOUGH` of them in files that may have none."""
        self.count += 1
        self.reasons[_kind_of(reason)] += 1
        if len(self._shown) < SHOWN:
            self._shown.append(f"{file}:{line}: {reason}" if file else f"line {line}: {reason}")
        if self.keep:
            row = {"file": file, "line": line, "reason": reason, "text": text}
            with self.keep.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")  # ASCII: half a surrogate pair has no UTF-8
        if not self.reading.skip and self.count >= ENOUGH:
            raise self._refusal("\nand more lines, perhaps", HINT)

    def check(self, good: int, name: str) -> None:
        """UserError when there are more bad lines beside `good` samples than are allowed, or no sample is left."""
        if self.count and not self.reading.skip:
            more = f"\nand {self.count - SHOWN} more lines" if self.count > SHOWN else ""
            raise self._refusal(more, f"{HINT}; --skip-bad-lines leaves such lines out")
        share = self.count / (self.count + good) if self.count else 0
        if share > self.reading.max_bad_share or (self.count and not good):
            raise self._refusal(
                f"\n{name}: {self.count} of {self.count + good} lines are bad, {share:.1%}, and --max-bad-share is "
                f"{self.reading.max_bad_share:g} ({self.summary})",
                HINT,
            )
        if not good:
            raise UserError(f"{name} holds no sample", HINT)

    def _refusal(self, end: str, hint: str) -> UserError:
        return UserError("\n".join(self._shown) + end, hint)

    @property
    def summary(self) -> str:
        """The reasons with their counts, the most frequent first."""
        common = self.reasons.most_common(SHOWN)
        rest = self.count - sum(count for _, count in common)
        return ", ".join([*(f"{count} x {reason}" for reason, count in common), *([f"{rest} others"] if rest else [])])


def _kind_of(reason: str) -> str:
    """A reason without what differs from line to line: numbers, and what is quoted."""
    return re.sub(r"\d+", "N", re.sub(r"'[^']*'", "...", reason))[:80]


def stream(files: Iterable[Path], bad: BadLines) -> Iterator[Sample]:
    """The samples of files, in order; what is none goes to `bad`, which the caller checks at the end.

    Raises:
        UserError: a file that cannot be read.
    """
    keys = Keys(bad.reading.keys)
    for file in files:
        first: tuple[str, int] | None = None
        for row in rows.read(file, keys.columns):
            try:
                if row.problem:
                    raise ValueError(row.problem)
                kind, sample = sample_kinds.sample(row.number, row.value, keys, bad.reading.system)
                first = first or (kind, row.number)
                if kind != first[0]:
                    raise ValueError(
                        f"has {' and '.join(KINDS[kind])}, where line {first[1]} has {' and '.join(KINDS[first[0]])}: "
                        "a file has one kind of sample"
                    )
            except ValueError as error:
                bad.add(paths.short(file), row.number, str(error), row.text)
                continue
            yield replace(sample, file=str(file))


def read(path: Path, reading: Reading = DEFAULT) -> list[Sample]:
    """Every sample of a file, in order; blank lines are skipped.

    Raises:
        UserError: no such file, no sample in it, or lines that are not samples: the first three with number and reason.
    """
    bad = BadLines(reading)
    samples = list(stream([path], bad))
    bad.check(len(samples), paths.short(path))
    return samples
