"""Where every rank stands when a run hangs: their Python stacks, grouped, and the odd one out. Standard library only.

Each rank lets `faulthandler` write the stacks of all its threads to its own log at SIGUSR2, from a handler in C that
needs no lock of Python's. Whoever sees that a run has stalled sends the signal before it ends the ranks. A process that
is stopped, or gone, leaves no stack, and that tells something too.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from superpod.common.redaction import redact_text
from superpod.common.units import format_ranks
from superpod.diagnosis.causes import BY_NAME, CERTAIN, CONFIDENCE
from superpod.diagnosis.rank_logs import tails
from superpod.diagnosis.verdict import FAILED, UNKNOWN, Evidence, Finding, Verdict, shown_path
from superpod.runtime.rank.capture import ASK
from superpod.runtime.runs.run_folder import Attempt

SETTLE_S = 3.0
"""How long ranks have to write their stacks."""
_POLL_S = 0.1
_DEEP = 40
"""Frames of a thread that are kept, the newest first."""

_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+(?: \[[^\]]*\])? \(most recent call first\):")
_FRAME = re.compile(r'^\s+File "(.*)", line (\d+) in (.*)$')
_OURS = (
    "heartbeat.py",
    "node_board.py",
    "tqdm/_monitor.py",
    "threading.py",
    "socketserver.py",
    "selectors.py",
    "event_file_writer.py",
)
"""Files of threads that work beside a training."""
_WORKERS = ("_worker_loop", "_bootstrap_inner_child", "resource_tracker")
_COMMUNICATION = re.compile(
    r"torch/distributed/|c10d|parallel_state|p2p_communication|pipeline_parallel/schedules|tensor_parallel/mappings|param_and_grad_buffer"
)
_WAITS = re.compile(
    r"^(wait|barrier|all_reduce|all_gather\w*|reduce_scatter\w*|broadcast\w*|all_to_all\w*|send|recv|isend|irecv|batch_isend_irecv"
    r"|_reduce|reduce|gather\w*|scatter\w*|monitored_barrier|synchronize|get|_store_based_barrier)$"
)


_LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python|/rehearsal/patches/|/superpod/|<frozen")
"""Files whose frames are nobody's own."""


@dataclass(frozen=True)
class Frame:
    """A place in a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({'/'.join(Path(self.file).parts[-2:])}:{self.line})"


@dataclass(frozen=True)
class Stack:
    """The threads of one rank that take part in its training, each newest frame first; the main thread last."""

    rank: int
    path: Path
    threads: tuple[tuple[Frame, ...], ...]

    @property
    def main(self) -> tuple[Frame, ...]:
        """The main thread's frames."""
        return self.threads[-1] if self.threads else ()

    @property
    def waits_in(self) -> Frame | None:
        """The communication that the rank waits in; None where it does something else."""
        for thread in self.threads:
            for frame in thread[:6]:
                if _COMMUNICATION.search(frame.file) and _WAITS.match(frame.function):
                    return frame
                if not ("/torch/" in frame.file or "/contextlib.py" in frame.file or "/megatron/" in frame.file):
                    break
        return None

    @property
    def stands_in(self) -> str:
        """The newest frames, and the newest that is no library's."""
        frames = next((thread for thread in self.threads if self.waits_in in thread), self.main)
        shown = list(frames[:2])
        own = next((frame for frame in frames if not _LIBRARY.search(frame.file)), None)
        if own is not None and own not in shown:
            shown.append(own)
        return " < ".join(map(str, shown)) or "no Python frame"


def ask(pids: Iterable[int], attempt: Attempt) -> None:
    """Have these processes write their stacks, those that listen, and wait until they have, SETTLE_S at most."""
    listening = 0
    for pid in pids:
        if _listens(pid):
            with contextlib.suppress(OSError):
                os.kill(pid, ASK)
                listening += not _is_stopped(pid)
    if listening:
        wait_for_logs(attempt)


def wait_for_logs(attempt: Attempt) -> None:
    """Wait until the logs no longer grow, SETTLE_S at most."""
    end = time.monotonic() + SETTLE_S
    before, same = -1, 0
    while time.monotonic() < end and same < 5:
        size = sum(_size(log) for log in attempt.logs)
        same = same + 1 if size == before else 0
        before = size
        time.sleep(_POLL_S)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _listens(pid: int) -> bool:
    """Whether a process catches the signal: it would end any other."""
    with contextlib.suppress(OSError, ValueError):
        status = Path(f"/proc/{pid}/status").read_text()
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
        return bool(caught and int(caught[1], 16) >> (ASK - 1) & 1)
    return False


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return bool(re.search(r"^State:\s*[Tt]", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    return False


def read(attempt: Path) -> list[Stack]:
    """The newest stacks in an attempt's logs, by rank."""
    stacks: dict[int, Stack] = {}
    for log in Attempt(attempt).logs:
        for rank, text in tails(log):
            if rank is not None and "most recent call first" in text:
                threads = _newest(text)
                if threads:
                    stacks[rank] = Stack(rank, log, threads)
    return [stacks[rank] for rank in sorted(stacks)]


def _newest(text: str) -> tuple[tuple[Frame, ...], ...]:
    """The threads of the last dump in a text that is of the rank itself, the main thread last."""
    dumps: list[list[list[Frame]]] = []
    inside = False
    for line in text.split("\n"):
        if thread := _THREAD.match(line):
            if not dumps or not inside or _ends(dumps[-1]):
                dumps.append([])
            dumps[-1].append([])
            inside = bool(thread)
        elif inside and (frame := _FRAME.match(line)):
            if len(dumps[-1][-1]) < _DEEP or frame[3] == "<module>":
                dumps[-1][-1].append(Frame(frame[1], int(frame[2]), frame[3]))
        elif line.strip() and not line.strip().startswith("..."):
            inside = False
    own = [dump for dump in dumps if not any(frame.function in _WORKERS for thread in dump for frame in thread)]
    if not own:
        return ()
    threads = [tuple(thread) for thread in own[-1] if thread and not _is_beside(thread)]
    threads.sort(key=lambda thread: thread[-1].function == "<module>")
    return tuple(threads)


def _ends(dump: list[list[Frame]]) -> bool:
    """Whether a dump is whole: the main thread is written last."""
    return bool(dump and dump[-1] and dump[-1][-1].function == "<module>")


def _is_beside(thread: Sequence[Frame]) -> bool:
    """Whether a thread only works beside the training, as the one of the heartbeat."""
    return (thread[-1].function != "<module>" and any(frame.file.endswith(_OURS[:3]) for frame in thread)) or (
        thread[-1].function == "_bootstrap" and all("/threading.py" in f.file or f.file.endswith(_OURS) for f in thread)
    )


def describe(attempt: Path, size: int = 0) -> str:
    """The odd one out in words: '' where no stacks were left. `size` is how many ranks there are, 0 = not known."""
    stacks = read(attempt)
    return _words(stacks, _absent(stacks, size)) if stacks else ""


def describe_stall(silent: str, attempt: Attempt) -> str:
    """What heartbeats say of a stall, and where each rank stood."""
    stacks = read(attempt.path)
    sizes = [int(beat.get("size", 0)) for beat in attempt.heartbeats().values()]
    absent = _absent(stacks, max(sizes, default=0))
    if not stacks:
        return silent
    odd = set(absent) or {stack.rank for stack in odd_ones(stacks)}
    named = re.match(r"rank (\d+)", silent)
    if odd and named and int(named[1]) not in odd:  # heartbeats tell a second apart; who waits for whom, stacks do
        return f"{_words(stacks, absent)}; by the heartbeats, {silent.replace(', before the others', '')}"
    return f"{silent}; {_words(stacks, absent)}"


def _absent(stacks: Sequence[Stack], size: int) -> list[int]:
    return sorted(set(range(size)) - {stack.rank for stack in stacks})


def _words(stacks: Sequence[Stack], absent: Sequence[int]) -> str:
    odd = odd_ones(stacks) if not absent else []
    others = [stack for stack in stacks if stack not in odd]
    parts = []
    if absent:
        parts.append(f"{format_ranks(absent)} left no stack (stopped, or gone)")
    parts += [f"{format_ranks([s.rank for s in group])} stood in {group[0].stands_in}" for group in _grouped(odd)]
    for group in _grouped(others)[:3]:
        parts.append(f"{format_ranks([s.rank for s in group])} waited in {group[0].stands_in}")
    return redact_text("; ".join(parts))


def odd_ones(stacks: Sequence[Stack]) -> list[Stack]:
    """The ranks that the others wait for: those in no communication, else those in another one than most."""
    free = [stack for stack in stacks if stack.waits_in is None]
    if free and len(free) < len(stacks):
        return free
    groups = _grouped(stacks)
    if len(groups) > 1 and len(groups[-1]) < len(groups[0]):
        return [stack for group in groups if len(group) < len(groups[0]) for stack in group]
    return []


def _grouped(stacks: Sequence[Stack]) -> list[list[Stack]]:
    """Ranks that stand in the same place, the largest group first."""
    groups: dict[tuple[object, ...], list[Stack]] = {}
    for stack in stacks:
        wait = stack.waits_in
        key = (wait.file, wait.function, *_own(stack)) if wait else tuple((f.file, f.function) for f in stack.main[:4])
        groups.setdefault(key, []).append(stack)
    return sorted(groups.values(), key=lambda group: (-len(group), group[0].rank))


def _own(stack: Stack) -> tuple[object, ...]:
    """Where a wait was begun: the newest frame outside torch's own communication."""
    frames = next((thread for thread in stack.threads if stack.waits_in in thread), ())
    return next(((f.file, f.function, f.line) for f in frames if "/torch/" not in f.file), ())


def add_stacks(verdict: Verdict, attempt: Path, base: Path | None) -> Verdict:
    """The verdict with where every rank of a run that hung stood."""
    if verdict.root and verdict.root.name not in ("hang", "nccl_timeout", "rank_gone_slow"):
        return verdict
    if not verdict.root and verdict.state != UNKNOWN:
        return verdict
    stacks = read(attempt)
    if not stacks:
        return verdict
    beats = Attempt(attempt).heartbeats()
    size = max((int(beat.get("size", 0)) for beat in beats.values()), default=0) or len(beats)
    absent = _absent(stacks, size)
    odd = odd_ones(stacks) if not absent else []
    ranks = tuple(absent or [stack.rank for stack in odd])
    where = _words(stacks, absent)
    shown = tuple(
        Evidence(
            shown_path(stack.path, base), 0, redact_text(f"rank {stack.rank} stood in {stack.stands_in}"), stack.rank
        )
        for stack in [*odd, *(s for s in stacks if s not in odd)][:4]
    )
    cause = BY_NAME["hang"]
    if verdict.root is None:
        root = Finding(cause.name, cause.means, CONFIDENCE[CERTAIN], cause.fix, ranks, shown, where)
        return replace(verdict, state=FAILED, root=root, first_error=None)
    first = verdict.root.evidence[0].text if verdict.root.evidence else ""
    detail = verdict.root.detail or first
    detail = detail if where in detail else f"{detail}; {where}" if detail else where
    lines = [line for line in verdict.root.evidence[:1] if line.number or line.text not in detail]
    return replace(
        verdict,
        root=replace(
            verdict.root,
            detail=detail,
            ranks=ranks or verdict.root.ranks,
            evidence=(*lines, *shown),
        ),
    )
