"""The lines of a log, of any size, packed or not, from any launcher. Standard library only.

A file is read once, in pieces. Logs repeat themselves: of lines that differ in their digits only, the first few are
looked at, and all of them as long as they tell something, so that a gigabyte takes seconds and little memory, and no
line that stands once is missed.
"""

from __future__ import annotations

import bz2
import calendar
import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from superpod.common.files import refuse_special

PIECE = 4 << 20
"""Bytes that are read at a time; a line is cut there at the latest."""
UNPACKED = 16 << 10
"""Bytes that are unpacked at a time: of a packed file that is cut off, so many are lost at most."""
BEGINNING, MOST_CODES = 64 << 10, 0.02
"""Bytes by which a file is known to be a log, and the share of codes there that no text has: of random bytes 0.1."""
LONGEST = 4000
"""Characters of a line that are looked at."""
BORING, VOLATILE = 4, 400
"""How many lines of a form that tells nothing are looked at, and of one whose digits may tell something."""
OFTEN, VERY_OFTEN = 20_000, 200_000
"""Of a form that tells something, all lines are looked at up to the first; then one of 16, then one of 256."""
MOST_FORMS = 300_000
"""Forms that are remembered; a log that has more is looked at anew from there."""

_VOLATILE = re.compile(rb"xid|exit|signal|code|errno|status|http|client|rank|nan|loss|error", re.IGNORECASE)
_DIGITS = b"0123456789"
_NO_TEXT = bytes(code for code in (*range(1, 32), 127) if code not in b"\a\b\t\n\v\f\r\x1b")
_ANSI = re.compile(
    r"\x1b\[[0-9;?]*[ -/]*[@-~]"
    r"|\[\d{1,3}(?:;\d{1,3}){0,4}m"  # a colour whose escape character was lost when the log was copied
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"
)
_TIME = re.compile(r"(\d{4})[-/](\d\d)[-/](\d\d)[T_ ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_STAMP = re.compile(
    r"\[?\d{4}[-/]\d\d[-/]\d\d[T_ ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?(?:\s(?:stderr|stdout) [FP])?\s?"
)
_RANKS = tuple(
    re.compile(pattern)
    for pattern in (
        r"\[(?:default|rank|trainer|Rank|RANK|rank:)[ _-]?(\d+)\](?::|\s-)?\s?",
        r"\[(?:prterun-\S+@)?\d+,(?:mpirank:)?(\d+)(?:,[\w.-]+)?\]<std(?:out|err|diag)>:\s?",  # Open MPI, SageMaker
        r"\[(\d+)\]:\s?",
        r"(?:rank|Rank|RANK)[ _:=]{0,2}(\d+)\s?[:|\]]\s",
        r"\((?:rank|Rank|RANK) (\d+)\)\s",
    )
)
_LABEL = re.compile(r" {0,5}(\d{1,5}): ?")
_SOURCE_PREFIX = re.compile(
    r"(?:[\w.-]+/\d+ (?=\[)"
    r"|(?=[a-z.-]*\d)[a-z][a-z0-9.-]{1,60}: (?=\S)"  # pdsh, DeepSpeed: `worker-1: `
    r"|(?:\d{1,3}\.){3}\d{1,3}: "
    r"|\[pod/[^\]\s]+\] "  # kubectl logs --prefix
    r"|[a-z][\w.-]*\d\s+\|\s(?=\S))"  # docker compose
)
"""The host, pod or service that a launcher puts before a line."""
_PROCESS_PREFIX = re.compile(
    r"\((?=(?:[^()]|\([^()]*\))*\b(?:pid|ip|rank)=)(?:[\w.:-]+(?:\([^()]*\))? ?)*[ ,]*(?:\w+=[^\s,()]+(?:, ?|\s)?)+\) ?"
)
"""Ray and frameworks on it: `(WorkerDict pid=8930, ip=10.0.0.1) `, `(worker6, rank=6, pid=8930) `."""
_PROCESS_RANK = re.compile(r"\brank=(\d+)")
_PROGRESS_BAR = re.compile(
    r"^.{0,200}?\d{1,3}%\s?\|[^|]{0,400}\|\s*[\d.,]+\w?/[\d.,?]+\w?\s*[\[(][^\])]{0,300}[\])]:?\s*(?=\S)"
)
"""A progress bar of tqdm that another message continues on the same line."""
_OWN_RANK = re.compile(
    r"\[(?:PG [^\]]*?|[^\]]{0,60} )?Rank (\d+)\]|^(?:\w*Error: )?Rank (\d+)\b|\bon rank (\d+)\b", re.IGNORECASE
)
_FILE_RANKS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"/\d+\.(\d+)\.log(?:\.\w+)?$",
        r"(?:^|[^a-z])rank[._-]?(\d+)(?!\d)[^/]*$",
        r"attempt_\d+/(\d+)/std(?:err|out)\.log$",
        r"_(\d+)\.(?:log|out|err|txt)(?:\.\w+)?$",
    )
)


@dataclass(frozen=True)
class LogLine:
    """A line without what a launcher put before it: where it stands, who wrote it and when, as far as that is known."""

    path: Path
    number: int
    text: str
    rank: int | None = None
    at: float = 0.0
    """Unix time; 0 = unknown"""
    before: str = ""
    """the line before it"""


Look = Callable[[LogLine], bool]
"""Looks at a line; returns whether lines of its form tell anything."""


def scan(path: Path, look: Look, tail: int = 0) -> int | None:
    """Show the lines of a file to `look`: of its last `tail` bytes only, where that is given.

    Returns after how many lines it can be read no further, as a packed file that is cut off; None where it ends well.
    Raises OSError when it cannot be read.
    """
    refuse_special(path)
    forms: dict[bytes, int] = {}
    number, last = 1, 0.0
    file_rank, labelled = rank_of_file(path), None
    pieces = _Pieces(path, tail)
    for piece in pieces:
        if labelled is None:
            labelled = _is_labelled(piece)
        raw = piece.split(b"\n")
        if len(forms) > MOST_FORMS:
            forms.clear()
        for index, line in enumerate(raw):
            form = (
                line.translate(None, _DIGITS) if len(line) < 400 else line[:300].translate(None, _DIGITS) + line[-60:]
            )
            seen = forms.get(form, 0)
            if _is_skipped(seen):
                forms[form] = seen + 1 if seen > 0 else seen
                continue
            telling = False
            for text in _texts(line):
                at = time_of(text) or last
                rank, text = _stripped(text, labelled)
                before = raw[index - 1][-LONGEST:] if index else b""
                rank = file_rank if rank is None else rank
                shown = LogLine(
                    path, number + index, text, own_rank(text) if rank is None else rank, at, _decoded(before)
                )
                last = at
                telling |= look(shown)
            if telling:
                forms[form] = max(seen, 0) + 1
            elif seen <= 0:
                forms[form] = seen - 1 if seen else -1 if _VOLATILE.search(line) else BORING - VOLATILE - 1
        number += len(raw) - 1
    return number - 1 if pieces.is_damaged else None


def _is_skipped(seen: int) -> bool:
    """Whether a line is not looked at, whose form told something `seen` times, or, where negative, nothing so often."""
    if seen > VERY_OFTEN:
        return seen % 256 != 0
    return seen % 16 != 0 if seen > OFTEN else seen <= -VOLATILE


def _texts(line: bytes) -> list[str]:
    """The messages of one line: progress bars overwrite one another, or share the line with a message."""
    if not line.strip():
        return []
    text = _decoded(line)
    parts = [text] if "\r" not in text else [part for part in text.split("\r") if part.strip()][-200:]
    return [piece for part in parts for piece in _without_progress_bar(part)]


def _without_progress_bar(text: str) -> list[str]:
    """A line as the progress bar at its beginning, if there is one, and the message that follows it."""
    match = _PROGRESS_BAR.match(text)
    if match is None:
        return [text]
    bar, message = text[: match.end()].rstrip(), text[match.end() :]
    return [bar, *_without_progress_bar(message)]


def _decoded(line: bytes) -> str:
    text = (line if len(line) <= LONGEST else line[: LONGEST - 500] + b" ... " + line[-500:]).decode(errors="replace")
    text = without_codes(text)
    if text.startswith('{"'):
        text = _unwrapped(text)
    return text.rstrip()


def without_codes(text: str) -> str:
    """Text without the codes of colours, of a terminal's title and of its cursor."""
    return _ANSI.sub("", text)


def _unwrapped(text: str) -> str:
    """The message of a line of JSON, as Docker and Kubernetes write logs; the line itself where it is none."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return text
    for name in ("log", "message", "msg", "text"):
        if isinstance(record, dict) and isinstance(record.get(name), str):
            when = record.get("time") or record.get("timestamp") or ""
            return f"{when} {record[name]}".strip() if isinstance(when, str) else str(record[name])
    return text


def _stripped(text: str, labelled: bool) -> tuple[int | None, str]:
    """The rank that a launcher put before a line, and the line without that, times and hosts."""
    rank = None
    if labelled and (label := _LABEL.match(text)):
        rank, text = int(label[1]), text[label.end() :]
    for _ in range(4):
        before = text
        if match := _STAMP.match(text):
            text = text[match.end() :]
        for pattern in _RANKS:
            if match := pattern.match(text):
                rank, text = int(match[1]), text[match.end() :]
        if match := _SOURCE_PREFIX.match(text):
            text = text[match.end() :]
        if match := _PROCESS_PREFIX.match(text):
            named_rank = _PROCESS_RANK.search(match[0])
            if named_rank:
                rank = int(named_rank[1])
            text = text[match.end() :]
        if text == before:
            break
    return rank, text


def time_of(text: str) -> float:
    """The Unix time in a line, taken as UTC; 0 where it has none."""
    match = _TIME.search(text[:400])
    if not match:
        return 0.0
    fields = [int(match[i]) for i in range(1, 7)]
    if not (1990 < fields[0] < 2200 and 1 <= fields[1] <= 12 and 1 <= fields[2] <= 31):
        return 0.0
    return calendar.timegm((fields[0], fields[1], fields[2], fields[3], fields[4], fields[5])) + float(
        f"0.{match[7] or 0}"
    )


def own_rank(text: str) -> int | None:
    """The rank that a message names as its own: `[Rank 2] Watchdog ...`."""
    match = _OWN_RANK.search(text[:200])
    return int(next(group for group in match.groups() if group)) if match else None


def rank_of_file(path: Path) -> int | None:
    """The rank whose log a file is, by the names that launchers give; None for the log of several."""
    if re.fullmatch(r"(slurm|job)[-_]?\d+(_\d+)?\.\w+", path.name):
        return None  # a job array's task is no rank
    name = f"/{path.as_posix()}"
    return next((int(match[1]) for pattern in _FILE_RANKS if (match := pattern.search(name))), None)


def _is_labelled(piece: bytes) -> bool:
    """Whether srun put the rank before each line (`--label`)."""
    first = [line for line in piece[: 1 << 16].decode(errors="replace").split("\n")[:200] if line.strip()]
    return len(first) > 1 and sum(bool(_LABEL.match(line)) for line in first) > 0.6 * len(first)


class _Pieces:
    """The file's bytes, cut at line ends where there are any; and whether they end where a packed file is damaged."""

    def __init__(self, path: Path, tail: int) -> None:
        self.path, self.tail, self.is_damaged = path, tail, False

    def __iter__(self) -> Iterator[bytes]:
        file, packed = _opened(self.path)
        with file:
            if self.tail and not packed and self.path.stat().st_size > self.tail:
                file.seek(-self.tail, 2)
                file.readline()
            rest = b""
            while not self.is_damaged:
                block, self.is_damaged = _block(file)
                if not block:
                    break
                block = rest + block
                end = block.rfind(b"\n") + 1 or len(block)
                yield block[:end]
                rest = block[end:]
            if rest:
                yield rest


def _block(file: IO[bytes], size: int = PIECE) -> tuple[bytes, bool]:
    """The next bytes of a file, as far as they can be read; and whether it is cut off or damaged there."""
    parts: list[bytes] = []
    left = size
    while left > 0:
        try:
            part = file.read(min(left, UNPACKED))
        except (EOFError, OSError, zlib.error, lzma.LZMAError):
            return b"".join(parts), True
        if not part:
            break
        parts.append(part)
        left -= len(part)
    return b"".join(parts), False


def is_text(path: Path) -> bool:
    """Whether a file, unpacked where it is packed, may be a log: its beginning has next to no codes that no text has.

    Zeros do not count, which a log begins with that was emptied while it was written to; nor do bytes of any encoding.
    """
    refuse_special(path)
    file, _ = _opened(path)
    with file:
        start, is_damaged = _block(file, BEGINNING)
        if not start:
            return True
        written = start.replace(b"\0", b"")
        while start and not written and not is_damaged:
            start, is_damaged = _block(file, PIECE)
            written = start.replace(b"\0", b"")
    codes = len(written) - len(written.translate(None, _NO_TEXT))
    return bool(written) and codes <= MOST_CODES * len(written)


_PACKINGS: dict[bytes, Callable[[Path], Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
"""How a packed file begins, and what opens it."""


def _opened(path: Path) -> tuple[IO[bytes], bool]:
    """The file, unpacked where it is packed; and whether it is."""
    file = open(path, "rb")  # noqa: SIM115
    start = file.read(6)
    for first, unpacked in _PACKINGS.items():
        if start.startswith(first):
            file.close()
            return unpacked(path), True
    file.seek(0)
    return file, False
