"""Read the lines of a log of any size, compressed or not, from any launcher. Standard library only.

A file is read once, in blocks. Lines that differ only in their digits have the same *template*. The first lines of a
template are examined, and the others only if the first ones were informative. Therefore a gigabyte takes seconds and
little memory, and a line that occurs only once is never missed.
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

from superpod.common.json_files import refuse_special

BLOCK_BYTES = 4 << 20
"""Bytes per block; longer lines are split."""
READ_BYTES = 16 << 10
"""Bytes to decompress at a time; at most this many are lost at the end of a truncated file."""
START_BYTES, MAX_CONTROL_SHARE = 64 << 10, 0.02
"""Bytes that `is_text` reads, and the maximum share of control characters in them; random bytes have 0.1."""
MAX_CHARS = 4000
"""Maximum number of characters to examine per line."""
MAX_EXAMINED, MAX_EXAMINED_VOLATILE = 4, 400
"""Maximum number of lines to examine per uninformative template, and per template whose digits may be informative."""
OFTEN, VERY_OFTEN = 20_000, 200_000
"""All lines of an informative template are examined up to OFTEN, then one in 16, and after VERY_OFTEN one in 256."""
MAX_TEMPLATES = 300_000
"""Maximum number of templates to remember; beyond it, all are forgotten."""

_VOLATILE = re.compile(rb"xid|exit|signal|code|errno|status|http|client|rank|nan|loss|error", re.IGNORECASE)
_DIGITS = b"0123456789"
_CONTROL_BYTES = bytes(code for code in (*range(1, 32), 127) if code not in b"\a\b\t\n\v\f\r\x1b")
_ANSI = re.compile(
    r"\x1b\[[0-9;?]*[ -/]*[@-~]"
    r"|\[\d{1,3}(?:;\d{1,3}){0,4}m"  # a color whose escape character was lost when the log was copied
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
"""The host, pod or service that a launcher adds before each line."""
_PROCESS_PREFIX = re.compile(
    r"\((?=(?:[^()]|\([^()]*\))*\b(?:pid|ip|rank)=)(?:[\w.:-]+(?:\([^()]*\))? ?)*[ ,]*(?:\w+=[^\s,()]+(?:, ?|\s)?)+\) ?"
)
"""Prefix from Ray and frameworks that use it: `(WorkerDict pid=8930, ip=10.0.0.1) `, `(worker6, rank=6, pid=8930) `."""
_PROCESS_RANK = re.compile(r"\brank=(\d+)")
_PROGRESS_BAR = re.compile(
    r"^.{0,200}?\d{1,3}%\s?\|[^|]{0,400}\|\s*[\d.,]+\w?/[\d.,?]+\w?\s*[\[(][^\])]{0,300}[\])]:?\s*(?=\S)"
)
"""A progress bar of tqdm, followed by another message on the same line."""
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
    """A log line without the launcher's prefix, and its position, rank and time."""

    path: Path
    number: int
    text: str
    rank: int | None = None
    """None = unknown"""
    at: float = 0.0
    """Unix time in seconds; 0 = unknown"""
    before: str = ""
    """the previous line"""
    frame: str = ""
    """the innermost frame of the traceback that ends with this line"""


Examine = Callable[[LogLine], bool]
"""A function that examines a line, and returns whether lines of its template are informative."""


def scan(path: Path, examine: Examine, tail: int = 0) -> int | None:
    """Call `examine` for the lines of a log, without most of the repetitive ones.

    Args:
        path: the log; it may be compressed.
        examine: function that examines a line, and returns whether lines of its template are informative.
        tail: number of bytes at the end of an uncompressed log to read; 0 = the entire log.

    Returns:
        The number of readable lines if the file is a truncated or corrupt archive; None if it is intact.

    Raises:
        OSError: the file cannot be read.
    """
    refuse_special(path)
    templates: dict[bytes, int] = {}
    number, last_time = 1, 0.0
    file_rank, has_labels = rank_of_file(path), None
    blocks = _Blocks(path, tail)
    for block in blocks:
        if has_labels is None:
            has_labels = _is_labelled(block)
        raw_lines = block.split(b"\n")
        if len(templates) > MAX_TEMPLATES:
            templates.clear()
        for index, line in enumerate(raw_lines):
            template = _template(line)
            count = templates.get(template, 0)
            if _is_skipped(count):
                templates[template] = count + 1 if count > 0 else count
                continue
            is_informative = False
            for text in _split_messages(line):
                last_time = time_of(text) or last_time
                rank, text = _strip_prefixes(text, has_labels)
                if rank is None:
                    rank = file_rank
                if rank is None:
                    rank = own_rank(text)
                before = _decode(raw_lines[index - 1][-MAX_CHARS:]) if index else ""
                is_informative |= examine(LogLine(path, number + index, text, rank, last_time, before))
            templates[template] = _next_count(line, count, is_informative)
        number += len(raw_lines) - 1
    return number - 1 if blocks.is_damaged else None


def _template(line: bytes) -> bytes:
    """Return the template of a line: the line without its digits; for a long line, only its start and its end."""
    if len(line) < 400:
        return line.translate(None, _DIGITS)
    return line[:300].translate(None, _DIGITS) + line[-60:]


def _next_count(line: bytes, count: int, is_informative: bool) -> int:
    """Return the count for the template of a line that was just examined, from the template's previous count.

    The count is positive once a line of the template was informative, negative before. At -MAX_EXAMINED_VOLATILE, lines
    of the template are no longer examined.
    """
    if is_informative:
        return max(count, 0) + 1
    if count > 0:
        return count
    if count < 0:
        return count - 1
    return -1 if _VOLATILE.search(line) else MAX_EXAMINED - MAX_EXAMINED_VOLATILE - 1


def _is_skipped(count: int) -> bool:
    """Return whether to skip a line, based on the count of its template (see `_next_count`)."""
    if count > VERY_OFTEN:
        return count % 256 != 0
    return count % 16 != 0 if count > OFTEN else count <= -MAX_EXAMINED_VOLATILE


def _split_messages(line: bytes) -> list[str]:
    """Split a line into messages. A progress bar overwrites its line, and may be followed by a message."""
    if not line.strip():
        return []
    text = _decode(line)
    if "\r" not in text:
        return _split_progress_bar(text)
    parts = [part for part in text.split("\r") if part.strip()]
    return [piece for part in parts[-200:] for piece in _split_progress_bar(part)]


def _split_progress_bar(text: str) -> list[str]:
    """Split a line into the progress bars at its start, if there are any, and the message that follows."""
    match = _PROGRESS_BAR.match(text)
    if match is None:
        return [text]
    bar, message = text[: match.end()].rstrip(), text[match.end() :]
    return [bar, *_split_progress_bar(message)]


def _decode(line: bytes) -> str:
    """Return a line as text without terminal codes, and without the middle if it is longer than MAX_CHARS bytes."""
    if len(line) > MAX_CHARS:
        line = line[: MAX_CHARS - 500] + b" ... " + line[-500:]
    text = without_codes(line.decode(errors="replace"))
    if text.startswith('{"'):
        text = _json_message(text)
    return text.rstrip()


def without_codes(text: str) -> str:
    """Return the text without control characters and terminal codes (colors, window title, cursor)."""
    return _ANSI.sub("", text)


def _json_message(text: str) -> str:
    """Return the time and message of a JSON log line from Docker or Kubernetes; return other lines unchanged."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return text
    for name in ("log", "message", "msg", "text"):
        if isinstance(record, dict) and isinstance(record.get(name), str):
            time_text = record.get("time") or record.get("timestamp") or ""
            return f"{time_text} {record[name]}".strip() if isinstance(time_text, str) else str(record[name])
    return text


def _strip_prefixes(text: str, is_labelled: bool) -> tuple[int | None, str]:
    """Return the rank in the launcher's prefix (None = no rank), and the line without prefixes, times and hosts."""
    rank = None
    label = _LABEL.match(text) if is_labelled else None
    if label:
        rank, text = int(label[1]), text[label.end() :]
    for _ in range(4):  # prefixes may be nested
        old_text = text
        match = _STAMP.match(text)
        if match:
            text = text[match.end() :]
        for pattern in _RANKS:
            match = pattern.match(text)
            if match:
                rank, text = int(match[1]), text[match.end() :]
        match = _SOURCE_PREFIX.match(text)
        if match:
            text = text[match.end() :]
        match = _PROCESS_PREFIX.match(text)
        if match:
            named_rank = _PROCESS_RANK.search(match[0])
            if named_rank:
                rank = int(named_rank[1])
            text = text[match.end() :]
        if text == old_text:
            break
    return rank, text


def time_of(text: str) -> float:
    """Return the time in a line as Unix time in seconds, read as UTC; 0 if the line contains no time."""
    match = _TIME.search(text[:400])
    if not match:
        return 0.0
    year, month, day, hour, minute, second = (int(match[i]) for i in range(1, 7))
    if not (1990 < year < 2200 and 1 <= month <= 12 and 1 <= day <= 31):
        return 0.0
    fraction = float(f"0.{match[7] or 0}")
    return calendar.timegm((year, month, day, hour, minute, second)) + fraction


def own_rank(text: str) -> int | None:
    """Return the rank with which a message names its sender, such as `[Rank 2] Watchdog ...`; None if unnamed."""
    match = _OWN_RANK.search(text[:200])
    if match is None:
        return None
    return int(next(group for group in match.groups() if group))


def rank_of_file(path: Path) -> int | None:
    """Return the rank in a log's file name, in the naming schemes of launchers; None if the name contains no rank."""
    if re.fullmatch(r"(slurm|job)[-_]?\d+(_\d+)?\.\w+", path.name):
        return None  # the task of a job array is not a rank
    name = f"/{path.as_posix()}"
    for pattern in _FILE_RANKS:
        match = pattern.search(name)
        if match:
            return int(match[1])
    return None


def _is_labelled(block: bytes) -> bool:
    """Return whether srun prefixed most lines of a block with their rank (`--label`)."""
    first = [line for line in block[: 1 << 16].decode(errors="replace").split("\n")[:200] if line.strip()]
    return len(first) > 1 and sum(bool(_LABEL.match(line)) for line in first) > 0.6 * len(first)


class _Blocks:
    """The blocks of a file, split at line ends if possible; iterating sets `is_damaged` if an archive is damaged."""

    def __init__(self, path: Path, tail: int) -> None:
        self.path, self.tail, self.is_damaged = path, tail, False

    def __iter__(self) -> Iterator[bytes]:
        file, is_compressed = _open_decompressed(self.path)
        with file:
            if self.tail and not is_compressed and self.path.stat().st_size > self.tail:
                file.seek(-self.tail, 2)
                file.readline()
            rest_of_block = b""
            while not self.is_damaged:
                block, self.is_damaged = _read_block(file)
                if not block:
                    break
                block = rest_of_block + block
                end = block.rfind(b"\n") + 1 or len(block)
                yield block[:end]
                rest_of_block = block[end:]
            if rest_of_block:
                yield rest_of_block


def _read_block(file: IO[bytes], size: int = BLOCK_BYTES) -> tuple[bytes, bool]:
    """Return up to `size` bytes of a file, and whether the file is truncated or corrupt after them."""
    parts: list[bytes] = []
    bytes_left = size
    while bytes_left > 0:
        try:
            part = file.read(min(bytes_left, READ_BYTES))
        except (EOFError, OSError, zlib.error, lzma.LZMAError):
            return b"".join(parts), True
        if not part:
            break
        parts.append(part)
        bytes_left -= len(part)
    return b"".join(parts), False


def is_text(path: Path) -> bool:
    """Return whether a file may be a log: whether its first bytes, decompressed, contain few control characters.

    Zero bytes are ignored, because a log that was truncated while open begins with them. Raises OSError if the file
    cannot be read.
    """
    refuse_special(path)
    file, _ = _open_decompressed(path)
    with file:
        start, is_damaged = _read_block(file, START_BYTES)
        if not start:
            return True
        content = start.replace(b"\0", b"")
        while start and not content and not is_damaged:
            start, is_damaged = _read_block(file)
            content = start.replace(b"\0", b"")
    control_count = len(content) - len(content.translate(None, _CONTROL_BYTES))
    return bool(content) and control_count <= MAX_CONTROL_SHARE * len(content)


_COMPRESSIONS: dict[bytes, Callable[[Path], Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
"""First bytes of a compressed file -> function that opens it."""


def _open_decompressed(path: Path) -> tuple[IO[bytes], bool]:
    """Open a file for reading, and return it and whether it is compressed."""
    file = open(path, "rb")  # noqa: SIM115
    start = file.read(6)
    for first, open_compressed in _COMPRESSIONS.items():
        if start.startswith(first):
            file.close()
            return open_compressed(path), True
    file.seek(0)
    return file, False
