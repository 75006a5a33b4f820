"""Stream the samples of files for fine-tuning, and collect lines that are not valid samples."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from superpod.data import paths
from superpod.data.readers import rows
from superpod.data.samples import sample_kinds
from superpod.data.samples.sample_kinds import HINT, KINDS, Keys, Sample
from superpod.errors import UserError

__all__ = ["BadLines", "ReadOptions", "Sample", "read_samples", "stream_samples"]

_MAX_SHOWN = 3
"""Maximum number of bad lines, or reasons, that a message lists."""
MAX_BAD_LINES = 1000
"""Number of bad lines after which reading stops if bad lines are not skipped."""
SKIPPED_FILE = "skipped.jsonl"
"""Name of the file with the skipped lines."""
MAX_BAD_SHARE = 0.05
"""Default maximum share of bad lines. With more, the file probably has another format."""


@dataclass(frozen=True)
class ReadOptions:
    """Options for reading samples.

    Attributes:
        keys: options NAME=KEY that rename keys of rows.
        skip: whether to skip bad lines, up to `max_bad_share` of all lines; if not, they are an error.
        max_bad_share: maximum share of skipped lines.
        system: system message for chats that have none; "" for none.
    """

    keys: tuple[str, ...] = ()
    skip: bool = False
    max_bad_share: float = MAX_BAD_SHARE
    system: str = ""

    def check(self) -> None:
        """Raise UserError if an option is invalid."""
        Keys(self.keys)
        if not 0 <= self.max_bad_share <= 1:
            raise UserError(
                f"--max-bad-share must be between 0 and 1, not {self.max_bad_share}", "0.05 is 5 % of the lines"
            )
        if self.system and not self.system.isascii():
            try:
                self.system.encode()
            except UnicodeEncodeError:
                raise UserError("--system is not UTF-8", "enter it again") from None


DEFAULT = ReadOptions()


@dataclass
class BadLines:
    """Collects the lines that are not valid samples.

    `keep` is a file to which they are written, one JSON object per line with file, line, reason and text; or None.
    """

    reading: ReadOptions = DEFAULT
    keep: Path | None = None
    count: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    _shown: list[str] = field(default_factory=list)

    def add(self, file: str, line: int, reason: str, text: str) -> None:
        """Add a bad line. Raises UserError at `MAX_BAD_LINES` lines if bad lines are not skipped."""
        self.count += 1
        self.reasons[_remove_details(reason)] += 1
        if len(self._shown) < _MAX_SHOWN:
            self._shown.append(f"{file}:{line}: {reason}" if file else f"line {line}: {reason}")
        if self.keep:
            row = {"file": file, "line": line, "reason": reason, "text": text}
            with self.keep.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")  # ASCII, because an unpaired surrogate cannot be encoded in UTF-8
        if not self.reading.skip and self.count >= MAX_BAD_LINES:
            raise self._error("and possibly more lines", HINT)

    def check(self, good: int, name: str) -> None:
        """Raise UserError if there are too many bad lines, or no samples.

        Args:
            good: number of valid samples.
            name: name of the source for the error message.
        """
        if self.count and not self.reading.skip:
            more = f"and {self.count - _MAX_SHOWN} more lines" if self.count > _MAX_SHOWN else ""
            raise self._error(more, f"{HINT}; --skip-bad-lines skips such lines")
        share = self.count / (self.count + good) if self.count else 0
        if share > self.reading.max_bad_share or (self.count and not good):
            message = (
                f"{name}: {self.count} of {self.count + good} lines are bad ({share:.1%}), but --max-bad-share is "
                f"{self.reading.max_bad_share:g}: {self.summary}"
            )
            raise self._error(message, HINT)
        if not good:
            raise UserError(f"{name} contains no sample", HINT)

    def _error(self, last_line: str, hint: str) -> UserError:
        return UserError("\n".join(filter(None, [*self._shown, last_line])), hint)

    @property
    def summary(self) -> str:
        """The most frequent reasons with their counts, such as "3 x not JSON, 1 others"."""
        common = self.reasons.most_common(_MAX_SHOWN)
        texts = [f"{count} x {reason}" for reason, count in common]
        other_count = self.count - sum(count for _, count in common)
        if other_count:
            texts.append(f"{other_count} others")
        return ", ".join(texts)


def _remove_details(reason: str) -> str:
    """Return a reason without numbers and quoted text, which vary between lines."""
    return re.sub(r"\d+", "N", re.sub(r"'[^']*'", "...", reason))[:80]


def stream_samples(files: Iterable[Path], bad: BadLines) -> Iterator[Sample]:
    """Yield the samples of the files in order, and add the lines that are not valid samples to `bad`.

    The caller must call `bad.check` at the end.

    Raises:
        UserError: a file cannot be read.
    """
    keys = Keys(bad.reading.keys)
    for file in files:
        first: tuple[str, int] | None = None
        for row in rows.read_rows(file, keys.columns):
            try:
                if row.problem:
                    raise ValueError(row.problem)
                kind, sample = sample_kinds.convert_row(row.number, row.value, keys, bad.reading.system)
                first = first or (kind, row.number)
                if kind != first[0]:
                    raise ValueError(
                        f"has {' and '.join(KINDS[kind])}, but line {first[1]} has {' and '.join(KINDS[first[0]])}: a "
                        "file must have a single sample format"
                    )
            except ValueError as error:
                bad.add(paths.shorten(file), row.number, str(error), row.text)
                continue
            yield replace(sample, file=str(file))


def read_samples(path: Path, reading: ReadOptions = DEFAULT) -> list[Sample]:
    """Return all samples of a file in order. Raises UserError if there are none, or too many bad lines."""
    bad = BadLines(reading)
    samples = list(stream_samples([path], bad))
    bad.check(len(samples), paths.shorten(path))
    return samples
