"""Find the ranks that did not reach a collective, from the dumps of PyTorch's flight recorder. Standard library only.

Each rank writes a dump, such as `nccl_trace_rank_3` (TORCH_FR_DUMP_TEMP_FILE, TORCH_NCCL_DEBUG_INFO_TEMP_FILE): a
pickle or JSON of dictionaries, lists, strings and numbers (FlightRecorder.cpp in torch). Nothing else is unpickled,
since a dump may come from an untrusted source.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from superpod.common.json_files import JsonObject, refuse_special
from superpod.common.redaction import redact_text
from superpod.common.units import format_ranks
from superpod.diagnosis.causes import CAUSES_BY_NAME, CERTAIN, CONFIDENCE
from superpod.diagnosis.verdict import FAILED, HEALTHY, NO_FAILURE, UNKNOWN, Evidence, Finding, Verdict, shown_path

MAX_BYTES = 256 << 20
"""Maximum size of a dump to read."""
_NAME = re.compile(r"(?:trace|dump|fr|flight)[\w.]*?_?(?:rank)?_?(\d+)(?:\.(?:pkl|pickle|json))?$", re.IGNORECASE)
_MAX_FRAMES = 3
"""Maximum number of frames of a call site to show."""


class _PlainDataUnpickler(pickle.Unpickler):
    """Unpickles plain data, and raises UnpicklingError for classes and functions."""

    def find_class(self, module: str, name: str) -> object:
        raise pickle.UnpicklingError(f"not a flight-recorder dump: it contains {module}.{name}")

    def persistent_load(self, pid: object) -> object:
        raise pickle.UnpicklingError("not a flight-recorder dump: it contains persistent objects")


@dataclass(frozen=True)
class Dump:
    """The recorded calls of one rank."""

    path: Path
    rank: int
    entries: tuple[JsonObject, ...]
    """the calls, oldest first"""
    groups: JsonObject
    """name of a process group -> its configuration, such as its ranks"""


def files(folders: Iterable[Path]) -> list[Path]:
    """Return the paths of the dumps in folders and their subfolders, sorted."""
    return sorted(path for folder in folders for path in folder.rglob("*") if path.is_file() and is_dump(path))


def is_dump(path: Path) -> bool:
    """Return whether a file is a dump, based on its name and its first 200 bytes."""
    if not _NAME.search(path.name) or path.suffix in (".log", ".out", ".err", ".txt", ".gz"):
        return False
    try:
        refuse_special(path)
        with open(path, "rb") as file:
            start = file.read(200)
    except OSError:
        return False
    return start[:1] == b"\x80" or ((start[:1] == b"{" and b"version" in start) or b'"entries"' in start)


def read(path: Path) -> Dump | None:
    """Read a dump; return None if it is not a dump, is larger than `MAX_BYTES`, or contains more than plain data."""
    try:
        refuse_special(path)
        if path.stat().st_size > MAX_BYTES:
            return None
        data = path.read_bytes()
        record = json.loads(data) if data[:1] == b"{" else _PlainDataUnpickler(io.BytesIO(data)).load()
    except Exception:  # a corrupt pickle may raise any exception
        return None
    match = _NAME.search(path.name)
    if not isinstance(record, dict) or not isinstance(record.get("entries"), list) or match is None:
        return None
    entries = tuple(entry for entry in record["entries"] if isinstance(entry, dict))
    groups = record.get("pg_config")
    if not isinstance(groups, dict):
        groups = {}
    rank = record.get("rank")
    if not isinstance(rank, int):
        rank = int(match[1])
    return Dump(path, rank, entries, groups)


def add_dumps(verdict: Verdict, paths: Sequence[Path], base: Path | None) -> Verdict:
    """Return `verdict` with a finding on the collective in which ranks are stuck; unchanged if the dumps show none.

    It becomes the root cause if the verdict has none, or one that follows from it; otherwise it is added to `others`.

    Args:
        verdict: the verdict from the logs.
        paths: the dumps; files that are not dumps are ignored.
        base: the folder that displayed paths are relative to; None = show them unchanged.
    """
    dumps = [dump for dump in map(read, paths) if dump]
    finding = explain(dumps, base) if dumps else None
    if finding is None:
        return verdict

    root = verdict.root
    explains_root = root is not None and root.name in ("nccl_timeout", "hang", finding.name)
    if verdict.state not in (HEALTHY, NO_FAILURE, UNKNOWN) and not explains_root:
        return replace(verdict, others=(*verdict.others, finding))

    new_root, follows = finding, verdict.follows
    if root:
        new_root = replace(finding, evidence=(*finding.evidence, *root.evidence[:1]))
        if root.name != finding.name:
            follows = (root, *follows)
    follows = tuple(f for f in follows if f.name != new_root.name)
    return replace(verdict, state=FAILED, root=new_root, follows=follows, first_error=None, ended_with=None)


def explain(dumps: Sequence[Dump], base: Path | None = None) -> Finding | None:
    """Return a finding on the first incomplete collective and the ranks that missed it; None if there is none.

    A rank misses a collective if it did not reach it, or called a different one. `base` is as in `add_dumps`.
    """
    by_rank = {dump.rank: dump for dump in dumps}
    for group in _find_groups(dumps):
        finding = _find_stuck_collective(group, by_rank, base)
        if finding:
            return finding
    return None


@dataclass(frozen=True)
class _Group:
    """A process group."""

    name: str
    description: str
    members: frozenset[int]
    """the ranks; empty = unknown"""

    @property
    def title(self) -> str:
        """The name, followed by the description in parentheses if that differs."""
        return f"{self.name} ({self.description})" if self.description not in ("", self.name) else self.name


def _find_groups(dumps: Sequence[Dump]) -> list[_Group]:
    """Return the process groups in which ranks called collectives, ordered by their oldest incomplete call."""
    groups: dict[str, _Group] = {}
    pending: dict[str, float] = {}
    for dump in dumps:
        for entry in dump.entries:
            name, description = _read_group(entry)
            if name not in groups:
                groups[name] = _Group(name, description, _group_members(dumps, name))
            if entry.get("state") != "completed":
                created = entry.get("time_created_ns") or entry.get("time_created_us") or 0
                if not isinstance(created, (int, float)):
                    created = 0
                pending[name] = min(pending.get(name, float("inf")), float(created))
    return sorted(groups.values(), key=lambda group: pending.get(group.name, float("inf")))


def _read_group(entry: JsonObject) -> tuple[str, str]:
    """Return the name and description of a call's process group, in the format of any torch version."""
    group = entry.get("process_group")
    if isinstance(group, (list, tuple)) and group:
        return str(group[0]), str(group[-1])
    return str(entry.get("pg_id", 0 if group is None else group)), str(entry.get("pg_desc", ""))


def _group_members(dumps: Sequence[Dump], name: str) -> frozenset[int]:
    """Return the ranks of the process group `name`; empty if no dump lists them."""
    for dump in dumps:
        config = dump.groups.get(name)
        ranks = config.get("ranks") if isinstance(config, dict) else None
        if isinstance(ranks, str):
            return frozenset(int(number) for number in re.findall(r"\d+", ranks))
        if isinstance(ranks, (list, tuple)):
            return frozenset(int(rank) for rank in ranks if isinstance(rank, int))
    return frozenset()


def _collectives_in_group(dump: Dump, group: str) -> dict[int, JsonObject]:
    """Return the collectives that a rank called in the process group `group`, by sequence number."""
    calls: dict[int, JsonObject] = {}
    for entry in dump.entries:
        number = entry.get("collective_seq_id", entry.get("seq_id"))
        if isinstance(number, int) and _read_group(entry)[0] == group and not entry.get("is_p2p"):
            calls[number] = entry
    return calls


def _find_stuck_collective(group: _Group, by_rank: dict[int, Dump], base: Path | None) -> Finding | None:
    """Return a finding on the first collective that ranks of a group did not call, or called differently."""
    members = sorted(group.members or by_rank)
    calls = {rank: _collectives_in_group(by_rank[rank], group.name) for rank in members if rank in by_rank}
    for number in sorted({number for calls_of_rank in calls.values() for number in calls_of_rank}):
        entries = {rank: calls_of_rank[number] for rank, calls_of_rank in calls.items() if number in calls_of_rank}
        waiting_ranks = [rank for rank, entry in entries.items() if entry.get("state") != "completed"]
        absent_ranks = [rank for rank in members if rank not in entries and _is_behind(calls.get(rank), number)]
        signatures = Counter(map(_signature, entries.values()))
        if waiting_ranks and len(signatures) > 1:  # in a completed collective, the sizes may differ between ranks
            usual_signature = signatures.most_common(1)[0][0]
            odd_ranks = sorted(rank for rank, entry in entries.items() if _signature(entry) != usual_signature)
            entry = entries[odd_ranks[0]]
            detail = f"collective {number} of group {group.title}: {format_ranks(odd_ranks)} called "
            detail += f"{_signature(entry)}, the others {usual_signature}"
            return _make_finding("collective_mismatch", detail, odd_ranks, entry, by_rank[odd_ranks[0]], base)
        if waiting_ranks and absent_ranks:
            entry = entries[waiting_ranks[0]]
            location = f"collective {number} ({entry.get('profiling_name', '?')}) of group {group.title}"
            verb = "rank was" if len(waiting_ranks) == 1 else "ranks were"
            detail = f"{format_ranks(absent_ranks)} did not reach {location}, in which {len(waiting_ranks)} {verb} "
            detail += f"waiting{_describe_last_calls(absent_ranks, by_rank)}"
            return _make_finding("nccl_timeout", detail, absent_ranks, entry, by_rank[waiting_ranks[0]], base)
    return None


def _is_behind(calls: dict[int, JsonObject] | None, number: int) -> bool:
    """Return whether a rank had not reached collective `number`: it has no calls, or all of them precede it."""
    return not calls or max(calls) < number


def _signature(entry: JsonObject) -> str:
    """Return the name of a collective and, if they must be equal on all ranks, its input sizes."""
    name = str(entry.get("profiling_name", "?"))
    if "all_to_all" in name or "scatter" in name:
        return name
    return f"{name} {entry.get('input_sizes', '')}"


def _describe_last_calls(absent_ranks: list[int], by_rank: dict[int, Dump]) -> str:
    """Return a text with the last call of the first of `absent_ranks` that has one, and the ranks without a dump."""
    text = ""
    ranks_with_calls = [rank for rank in absent_ranks if rank in by_rank and by_rank[rank].entries]
    if ranks_with_calls:
        rank = ranks_with_calls[0]
        last = by_rank[rank].entries[-1]
        call_site = _call_site(last) or "an unknown call site"
        text = f"; the last call of rank {rank} was {last.get('profiling_name', '?')} at {call_site}"
    ranks_without_dump = [rank for rank in absent_ranks if rank not in by_rank]
    return f"{text}; {format_ranks(ranks_without_dump)} left no dump" if ranks_without_dump else text


def _make_finding(
    cause: str, detail: str, ranks: list[int], entry: JsonObject, dump: Dump, base: Path | None
) -> Finding:
    record = CAUSES_BY_NAME[cause]
    call, state = entry.get("profiling_name", "?"), entry.get("state", "?")
    text = f"rank {dump.rank}: {call} is {state}, called at {_call_site(entry) or '?'}"
    evidence = Evidence(shown_path(dump.path, base), 0, redact_text(text), dump.rank)
    return Finding(cause, record.means, CONFIDENCE[CERTAIN], record.fix, tuple(ranks), (evidence,), redact_text(detail))


def _call_site(entry: JsonObject) -> str:
    """Return the call site of a collective, innermost frame first, without PyTorch's frames; '' if it is unknown."""
    frames = [frame for frame in entry.get("frames") or () if isinstance(frame, dict)]
    own_frames = [frame for frame in frames if "/torch/" not in str(frame.get("filename", ""))] or frames
    return " < ".join(
        f"{frame.get('name', '?')} ({Path(str(frame.get('filename', '?'))).name}:{frame.get('line', '?')})"
        for frame in own_frames[:_MAX_FRAMES]
    )
