"""Analyze the Python stacks of all ranks when a run hangs, to find the rank that the others are waiting for.

On SIGUSR2, `faulthandler` writes the stacks of all threads of a rank to its log, from a C handler that does not need
the GIL. The process that detects a stall sends the signal before it kills the ranks. A stopped or dead process writes
no stack, which is evidence too. Standard library only.
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
from superpod.diagnosis.causes import CAUSES_BY_NAME, CERTAIN, CONFIDENCE
from superpod.diagnosis.rank_logs import tails
from superpod.diagnosis.verdict import FAILED, UNKNOWN, Evidence, Finding, Verdict, shown_path
from superpod.runtime.rank.capture import ASK
from superpod.runtime.runs.run_folder import Attempt

SETTLE_S = 3.0
"""Maximum seconds to wait until ranks have written their stacks."""
_POLL_S = 0.1
_MAX_FRAMES = 40
"""Maximum number of frames per thread, newest first."""

_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+(?: \[[^\]]*\])? \(most recent call first\):")
_FRAME = re.compile(r'^\s+File "(.*)", line (\d+) in (.*)$')
_BACKGROUND = (
    "heartbeat.py",
    "node_board.py",
    "tqdm/_monitor.py",
    "threading.py",
    "socketserver.py",
    "selectors.py",
    "event_file_writer.py",
)
"""Files of background threads."""
_WORKERS = ("_worker_loop", "_bootstrap_inner_child", "resource_tracker")
_COMMUNICATION = re.compile(
    r"torch/distributed/|c10d|parallel_state|p2p_communication|pipeline_parallel/schedules|tensor_parallel/mappings|param_and_grad_buffer"
)
_WAITS = re.compile(
    r"^(wait|barrier|all_reduce|all_gather\w*|reduce_scatter\w*|broadcast\w*|all_to_all\w*|send|recv|isend|irecv|batch_isend_irecv"
    r"|_reduce|reduce|gather\w*|scatter\w*|monitored_barrier|synchronize|get|_store_based_barrier)$"
)

_LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python|/rehearsal/patches/|/superpod/|<frozen")
"""Files of libraries and of this project, as opposed to user code."""


@dataclass(frozen=True)
class Frame:
    """A stack frame."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({'/'.join(Path(self.file).parts[-2:])}:{self.line})"


@dataclass(frozen=True)
class Stack:
    """The Python stacks of a rank."""

    rank: int
    path: Path
    """the log that contains the stacks"""
    threads: tuple[tuple[Frame, ...], ...]
    """frames per thread, newest first, without background threads; the main thread is last"""

    @property
    def main(self) -> tuple[Frame, ...]:
        """The frames of the main thread, newest first."""
        return self.threads[-1] if self.threads else ()

    @property
    def waits_in(self) -> Frame | None:
        """The frame of the communication call in which the rank waits; None if it does not wait in one."""
        for thread in self.threads:
            for frame in thread[:6]:
                if _COMMUNICATION.search(frame.file) and _WAITS.match(frame.function):
                    return frame
                if not ("/torch/" in frame.file or "/contextlib.py" in frame.file or "/megatron/" in frame.file):
                    break
        return None

    @property
    def location(self) -> str:
        """The two newest frames and the newest frame of user code, as text."""
        frames = next((thread for thread in self.threads if self.waits_in in thread), self.main)
        shown_frames = list(frames[:2])
        own_frame = next((frame for frame in frames if not _LIBRARY.search(frame.file)), None)
        if own_frame is not None and own_frame not in shown_frames:
            shown_frames.append(own_frame)
        return " < ".join(map(str, shown_frames)) or "no Python frame"


def request_stacks(pids: Iterable[int], attempt: Attempt) -> None:
    """Signal those of the processes `pids` that have a handler to write their stacks, and wait for the logs."""
    listening = 0
    for pid in pids:
        if _has_handler(pid):
            with contextlib.suppress(OSError):
                os.kill(pid, ASK)
                listening += not _is_stopped(pid)
    if listening:
        wait_for_logs(attempt)


def wait_for_logs(attempt: Attempt) -> None:
    """Wait until the logs of an attempt no longer grow, at most SETTLE_S seconds."""
    end = time.monotonic() + SETTLE_S
    old_size, equal_sizes = -1, 0
    while time.monotonic() < end and equal_sizes < 5:
        size = sum(_size(log) for log in attempt.logs)
        equal_sizes = equal_sizes + 1 if size == old_size else 0
        old_size = size
        time.sleep(_POLL_S)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _has_handler(pid: int) -> bool:
    """Return whether a process has a handler for the signal ASK, which would otherwise kill it."""
    with contextlib.suppress(OSError, ValueError):
        status = Path(f"/proc/{pid}/status").read_text()
        caught_signals = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
        return bool(caught_signals and int(caught_signals[1], 16) >> (ASK - 1) & 1)
    return False


def _is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal or a debugger."""
    with contextlib.suppress(OSError):
        return bool(re.search(r"^State:\s*[Tt]", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    return False


def read(attempt: Path) -> list[Stack]:
    """Return the newest stack of each rank that wrote one to the logs of an attempt, ordered by rank."""
    stacks: dict[int, Stack] = {}
    for log in Attempt(attempt).logs:
        for rank, text in tails(log):
            if rank is not None and "most recent call first" in text:
                threads = _parse_newest(text)
                if threads:
                    stacks[rank] = Stack(rank, log, threads)
    return [stacks[rank] for rank in sorted(stacks)]


def _parse_newest(text: str) -> tuple[tuple[Frame, ...], ...]:
    """Return the threads of the last dump in a log that is not from a data worker, the main thread last; () if none."""
    dumps: list[list[list[Frame]]] = []
    is_inside = False
    for line in text.split("\n"):
        frame = _FRAME.match(line) if is_inside else None
        if _THREAD.match(line):
            if not is_inside or _is_complete(dumps[-1]):
                dumps.append([])
            dumps[-1].append([])
            is_inside = True
        elif frame:
            if len(dumps[-1][-1]) < _MAX_FRAMES or frame[3] == "<module>":
                dumps[-1][-1].append(Frame(frame[1], int(frame[2]), frame[3]))
        elif line.strip() and not line.strip().startswith("..."):
            is_inside = False

    own_dumps = [dump for dump in dumps if not any(frame.function in _WORKERS for thread in dump for frame in thread)]
    if not own_dumps:
        return ()
    threads = [tuple(thread) for thread in own_dumps[-1] if thread and not _is_background(thread)]
    threads.sort(key=lambda thread: thread[-1].function == "<module>")
    return tuple(threads)


def _is_complete(dump: list[list[Frame]]) -> bool:
    """Return whether a dump contains the main thread, which is written last."""
    return bool(dump and dump[-1] and dump[-1][-1].function == "<module>")


def _is_background(thread: Sequence[Frame]) -> bool:
    """Return whether a thread runs in the background of the training, such as the heartbeat thread."""
    oldest = thread[-1].function
    if oldest != "<module>" and any(frame.file.endswith(_BACKGROUND[:3]) for frame in thread):
        return True
    return oldest == "_bootstrap" and all(
        "/threading.py" in frame.file or frame.file.endswith(_BACKGROUND) for frame in thread
    )


def describe(attempt: Path, size: int = 0) -> str:
    """Describe where the ranks of an attempt wait; '' without stacks. `size` is the number of ranks, 0 = unknown."""
    stacks = read(attempt)
    return _describe(stacks, _missing_ranks(stacks, size)) if stacks else ""


def describe_stall(stall_message: str, attempt: Attempt) -> str:
    """Describe a stall from the stacks of the ranks and `stall_message`, which `stall` derived from the heartbeats."""
    stacks = read(attempt.path)
    sizes = [int(beat.get("size", 0)) for beat in attempt.heartbeats().values()]
    missing_ranks = _missing_ranks(stacks, max(sizes, default=0))
    if not stacks:
        return stall_message
    suspects = set(missing_ranks) or {stack.rank for stack in find_blocking(stacks)}
    rank_match = re.match(r"rank (\d+)", stall_message)
    if suspects and rank_match and int(rank_match[1]) not in suspects:
        # Stacks show which rank the others are waiting for; heartbeats have a resolution of only a second.
        by_heartbeats = stall_message.replace(", before the others", "")
        return f"{_describe(stacks, missing_ranks)}; according to the heartbeats, {by_heartbeats}"
    return f"{stall_message}; {_describe(stacks, missing_ranks)}"


def _missing_ranks(stacks: Sequence[Stack], size: int) -> list[int]:
    """Return those of the ranks 0 to `size` - 1 that wrote no stack."""
    return sorted(set(range(size)) - {stack.rank for stack in stacks})


def _describe(stacks: Sequence[Stack], missing_ranks: Sequence[int]) -> str:
    blocking = find_blocking(stacks) if not missing_ranks else []
    other_stacks = [stack for stack in stacks if stack not in blocking]
    parts = []
    if missing_ranks:
        parts.append(f"{format_ranks(missing_ranks)} wrote no stack (stopped or dead)")
    for group in _group(blocking):
        verb = "were" if len(group) > 1 else "was"
        parts.append(f"{format_ranks([stack.rank for stack in group])} {verb} in {group[0].location}")
    for group in _group(other_stacks)[:3]:
        parts.append(f"{format_ranks([stack.rank for stack in group])} waited in {group[0].location}")
    return redact_text("; ".join(parts))


def find_blocking(stacks: Sequence[Stack]) -> list[Stack]:
    """Return the stacks of the ranks for which the others wait; [] if these cannot be determined.

    These are ranks outside communication calls, or else those in a less common call.
    """
    free_stacks = [stack for stack in stacks if stack.waits_in is None]
    if free_stacks and len(free_stacks) < len(stacks):
        return free_stacks
    groups = _group(stacks)
    if len(groups) > 1 and len(groups[-1]) < len(groups[0]):
        return [stack for group in groups if len(group) < len(groups[0]) for stack in group]
    return []


def _group(stacks: Sequence[Stack]) -> list[list[Stack]]:
    """Group stacks by the call in which the ranks are, the largest group first."""
    groups: dict[tuple[object, ...], list[Stack]] = {}
    for stack in stacks:
        wait = stack.waits_in
        if wait:
            key: tuple[object, ...] = (wait.file, wait.function, *_caller(stack))
        else:
            key = tuple((frame.file, frame.function) for frame in stack.main[:4])
        groups.setdefault(key, []).append(stack)
    return sorted(groups.values(), key=lambda group: (-len(group), group[0].rank))


def _caller(stack: Stack) -> tuple[object, ...]:
    """Return file, function and line of the newest frame outside torch in the waiting thread; () if there is none."""
    for thread in stack.threads:
        if stack.waits_in in thread:
            outer_frames = (frame for frame in thread if "/torch/" not in frame.file)
            return next(((frame.file, frame.function, frame.line) for frame in outer_frames), ())
    return ()


def add_stacks(verdict: Verdict, attempt: Path, base: Path | None) -> Verdict:
    """Return a verdict with the stacks of an attempt's ranks added, if it is about a hang or has no cause."""
    if verdict.root and verdict.root.name not in ("hang", "nccl_timeout", "rank_gone_slow"):
        return verdict
    if not verdict.root and verdict.state != UNKNOWN:
        return verdict
    stacks = read(attempt)
    if not stacks:
        return verdict
    heartbeats = Attempt(attempt).heartbeats()
    size = max((int(beat.get("size", 0)) for beat in heartbeats.values()), default=0) or len(heartbeats)
    missing_ranks = _missing_ranks(stacks, size)
    blocking = find_blocking(stacks) if not missing_ranks else []
    ranks = tuple(missing_ranks or [stack.rank for stack in blocking])
    description = _describe(stacks, missing_ranks)
    shown_stacks = []
    for stack in [*blocking, *(stack for stack in stacks if stack not in blocking)][:4]:
        text = redact_text(f"rank {stack.rank} was in {stack.location}")
        shown_stacks.append(Evidence(shown_path(stack.path, base), 0, text, stack.rank))

    cause = CAUSES_BY_NAME["hang"]
    if verdict.root is None:
        root = Finding(cause.name, cause.means, CONFIDENCE[CERTAIN], cause.fix, ranks, tuple(shown_stacks), description)
        return replace(verdict, state=FAILED, root=root, first_error=None)
    first = verdict.root.evidence[0].text if verdict.root.evidence else ""
    detail = verdict.root.detail or first
    if description not in detail:
        detail = f"{detail}; {description}" if detail else description
    lines = [line for line in verdict.root.evidence[:1] if line.number or line.text not in detail]
    root = replace(verdict.root, detail=detail, ranks=ranks or verdict.root.ranks, evidence=(*lines, *shown_stacks))
    return replace(verdict, root=root)
