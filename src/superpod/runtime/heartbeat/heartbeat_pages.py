"""Encode and decode the file `heartbeat/nodes`: one page of 4096 bytes per node, with one record per rank.

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
class RankLocation:
    """The location of a rank in a run."""

    node: int = 0
    """index of the node"""
    local_rank: int = 0
    local_size: int = 1
    """number of ranks on the node"""
    size: int = 0
    """number of ranks in the run; 0 = unknown"""

    @property
    def pages(self) -> int:
        """Number of pages per node."""
        return -(-self.local_size // PER_PAGE)

    @property
    def at(self) -> int:
        """Offset of the node's first page in the file, bytes."""
        return self.node * self.pages * PAGE

    @property
    def record_at(self) -> int:
        """Offset of the rank's record relative to the node's first page, bytes."""
        page, slot = divmod(self.local_rank, PER_PAGE)
        return page * PAGE + HEADER_BYTES + slot * RECORD_BYTES


def header(place: RankLocation, now: float, host: str) -> bytes:
    """Encode the header of a node's pages, which are written at Unix time `now` by the host `host`."""
    place_fields = (place.node, place.size, place.local_size, now, host.encode()[:128])
    body = _HEADER.pack(_MAGIC, 0, *place_fields).ljust(HEADER_BYTES, b"\0")
    return body[:_CRC_AT] + struct.pack("<I", zlib.crc32(body[_CRC_END:])) + body[_CRC_END:]


def record(rank: int, step: int, phase: str, alive_s: float, moved_s: float, facts: JsonObject) -> bytes:
    """Encode the record of a rank; if `facts` is too large, its longest values are truncated.

    `alive_s` is the Unix time of the heartbeat, `moved_s` that of the last progress.
    """
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
    """Return the phase in the bytes of a record; '' if the rank has not written one."""
    _, rank, _, _, _, phase, _ = _RECORD.unpack_from(raw)
    return _text(phase) if rank else ""


def decode(data: bytes) -> dict[int, JsonObject]:
    """Decode the content of `heartbeat/nodes` to the heartbeats by rank, ignoring torn writes.

    Keys of a heartbeat: `t` (last heartbeat), `moved` (last progress), `step`, `phase`, `host`, `node`, `seen` (last
    write of the node), `size` (number of ranks), `local_size`, and the rank's facts. All times are Unix times, from the
    clock of the rank's node.
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
    """Read the heartbeats by rank from the `heartbeat` folder of an attempt; None if the file `nodes` does not exist.

    `max_bytes` limits the number of bytes that are read, if only the first node is needed; 0 = all.
    """
    try:
        refuse_special(folder / NAME)
        # Opened for every read, so that an NFS client revalidates its cache.
        handle = os.open(folder / NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return decode(os.pread(handle, max_bytes or os.fstat(handle).st_size, 0))
    except OSError:
        return {}
    finally:
        os.close(handle)


def read_rank(folder: Path, rank: int) -> JsonObject:
    """Return the newest heartbeat of a rank; {} before its first heartbeat."""
    first = read(folder, PAGE) if rank == 0 else None  # rank 0 is on the first node
    if first and rank in first:
        return first[rank]
    by_rank = read(folder)
    if by_rank is None:
        return _last_line(folder, rank)
    return by_rank.get(rank, {})


def read_ranks(folder: Path) -> dict[int, JsonObject]:
    """Return the newest heartbeat of each rank, by rank."""
    by_rank = read(folder)
    if by_rank is not None:
        return by_rank
    ranks = sorted(int(path.stem) for path in folder.glob("*.jsonl") if path.stem.isdecimal())
    return {rank: _last_line(folder, rank) for rank in ranks}


def _last_line(folder: Path, rank: int) -> JsonObject:
    """Return the last line of `{rank}.jsonl`, the file of earlier versions; {} if there is none."""
    lines = tail_lines(folder / f"{rank}.jsonl")
    return lines[-1] if lines else {}


def longest_save_s(folder: Path) -> float:
    """Return the duration of rank 0's longest save in an attempt, in seconds; 0 without a save."""
    first = read(folder, PAGE)
    lines = read_lines(folder / "0.jsonl") if first is None else [first.get(0, {})]
    return max((line["save_s"] for line in lines if is_number(line.get("save_s"))), default=0.0)
