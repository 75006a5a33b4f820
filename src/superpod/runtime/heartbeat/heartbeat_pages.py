"""The format of `heartbeat/nodes`: one page of 4096 bytes per node, at a fixed offset, with one record per rank.

A page is the unit of the kernel's page cache: two NFS clients that write parts of the same page can overwrite each
other's bytes, so each page belongs to one node. Overwriting an open file does not access the metadata server, and the
file does not grow. Headers and records have checksums, so that readers ignore torn writes. Standard library only.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from superpod.common.json_files import JsonObject, is_number, read_lines, refuse_special, tail_lines

NAME = "nodes"
PAGE, HEADER_BYTES, RECORD_BYTES = 4096, 512, 448
PER_PAGE = (PAGE - HEADER_BYTES) // RECORD_BYTES
"""Ranks per page: 8. A node with more ranks has several pages."""

_MAGIC = b"heartbt1"
_HEADER = struct.Struct("<8sIIIId128s")
"""magic, crc32 of the rest, node index, ranks in the run, ranks on the node, Unix time of the write, host"""
_RECORD = struct.Struct("<IIqdd16sH")
"""crc32 of the rest, rank + 1, step, last heartbeat, last progress (Unix times), phase, size of the facts in bytes"""
_FACTS_BYTES = RECORD_BYTES - _RECORD.size
_CRC_AT, _CRC_END = 8, 12


@dataclass(frozen=True)
class Place:
    """The place of a rank: node index, local rank, number of ranks on the node, and in the run (0 = unknown)."""

    node: int = 0
    local_rank: int = 0
    local_size: int = 1
    size: int = 0

    @property
    def pages(self) -> int:
        """Number of pages per node."""
        return -(-self.local_size // PER_PAGE)

    @property
    def at(self) -> int:
        """Offset of the first page of the node in the file, bytes."""
        return self.node * self.pages * PAGE

    @property
    def record_at(self) -> int:
        """Offset of the rank's record from the first page of the node, bytes."""
        page, slot = divmod(self.local_rank, PER_PAGE)
        return page * PAGE + HEADER_BYTES + slot * RECORD_BYTES


def header(place: Place, now: float, host: str) -> bytes:
    """Encode the header of each page of a node, written at Unix time `now`."""
    place_fields = (place.node, place.size, place.local_size, now, host.encode()[:128])
    body = _HEADER.pack(_MAGIC, 0, *place_fields).ljust(HEADER_BYTES, b"\0")
    return body[:_CRC_AT] + struct.pack("<I", zlib.crc32(body[_CRC_END:])) + body[_CRC_END:]


def record(rank: int, step: int, phase: str, alive_s: float, moved_s: float, facts: JsonObject) -> bytes:
    """Encode the record of a rank; if `facts` does not fit, the longest text in it is truncated."""
    text = _encode_facts(facts)
    body = _RECORD.pack(0, rank + 1, step, alive_s, moved_s, phase.encode()[:16], len(text)) + text
    body = body.ljust(RECORD_BYTES, b"\0")
    return struct.pack("<I", zlib.crc32(body[4:])) + body[4:]


def _encode_facts(facts: JsonObject) -> bytes:
    text = json.dumps(facts, default=str, separators=(",", ":")).encode() if facts else b""
    while len(text) > _FACTS_BYTES:
        key = max(facts, key=lambda name: len(str(facts[name])))
        kept_text = str(facts[key])[: max(0, len(str(facts[key])) - (len(text) - _FACTS_BYTES) - 3)]
        facts = {**facts, key: f"{kept_text}..."} if kept_text else {k: v for k, v in facts.items() if k != key}
        text = json.dumps(facts, default=str, separators=(",", ":")).encode() if facts else b""
    return text


def phase_of(raw: bytes) -> str:
    """Return the phase in a record; '' for a rank without a record."""
    _, rank, _, _, _, phase, _ = _RECORD.unpack_from(raw)
    return phase.rstrip(b"\0").decode(errors="replace") if rank else ""


def decode(data: bytes) -> dict[int, JsonObject]:
    """Decode the heartbeats of all ranks, ignoring torn writes.

    Keys are `t` (last heartbeat), `moved` (last progress), `step`, `phase`, `host`, `node`, `seen` (last write of the
    node), `size` (number of ranks), `local_size`, and the rank's facts. All times are Unix times, from the clock of the
    rank's node.
    """
    by_rank: dict[int, JsonObject] = {}
    data = data.ljust(-(-len(data) // PAGE) * PAGE, b"\0")  # the file may end after the last record
    for start in range(0, len(data), PAGE):
        if data[start : start + 8] != _MAGIC:
            continue
        _, crc, node, size, local_size, seen, host = _HEADER.unpack_from(data, start)
        if crc != zlib.crc32(data[start + _CRC_END : start + HEADER_BYTES]):
            continue
        common = {"host": _text(host), "node": node, "seen": seen, "size": size, "local_size": local_size}
        for at in range(start + HEADER_BYTES, start + PAGE, RECORD_BYTES):
            crc, rank, step, alive, moved, phase, length = _RECORD.unpack_from(data, at)
            if not rank or crc != zlib.crc32(data[at + 4 : at + RECORD_BYTES]):
                continue
            facts = json.loads(data[at + _RECORD.size : at + _RECORD.size + length]) if length else {}
            by_rank[rank - 1] = {**facts, **common, "t": alive, "moved": moved, "step": step, "phase": _text(phase)}
    return by_rank


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def read(folder: Path, max_bytes: int = 0) -> dict[int, JsonObject] | None:
    """Read all heartbeats in the `heartbeat` folder of an attempt; None if an earlier version wrote the folder.

    `max_bytes` limits the number of bytes, if only the first node is needed; 0 = all.
    """
    try:
        refuse_special(folder / NAME)
        handle = os.open(
            folder / NAME, os.O_RDONLY | os.O_CLOEXEC
        )  # reopened each time, so that NFS revalidates its cache
    except OSError:
        return None
    try:
        return decode(os.pread(handle, max_bytes or os.fstat(handle).st_size, 0))
    except OSError:
        return {}
    finally:
        os.close(handle)


def read_rank(folder: Path, rank: int) -> JsonObject:
    """Read the newest heartbeat of a rank; {} before its first heartbeat."""
    first = read(folder, PAGE) if rank == 0 else None  # rank 0 is on the first node
    if first and rank in first:
        return first[rank]
    by_rank = read(folder)
    if by_rank is None:
        return _last_line(folder, rank)
    return by_rank.get(rank, {})


def read_ranks(folder: Path) -> dict[int, JsonObject]:
    """Read the newest heartbeats of all ranks."""
    by_rank = read(folder)
    if by_rank is not None:
        return by_rank
    ranks = sorted(int(path.stem) for path in folder.glob("*.jsonl") if path.stem.isdecimal())
    return {rank: _last_line(folder, rank) for rank in ranks}


def _last_line(folder: Path, rank: int) -> JsonObject:
    """Return the last line of `{rank}.jsonl`, the format of earlier versions."""
    lines = tail_lines(folder / f"{rank}.jsonl")
    return lines[-1] if lines else {}


def longest_save_s(folder: Path) -> float:
    """Return the duration of rank 0's longest save in seconds; 0 without a save."""
    first = read(folder, PAGE)
    lines = read_lines(folder / "0.jsonl") if first is None else [first.get(0, {})]
    return max((line["save_s"] for line in lines if is_number(line.get("save_s"))), default=0.0)
