"""Why a job failed, in one line, from the ranks' logs and the disk."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from superpod.node.run_folder import Attempt, RunFolder

_ERROR = re.compile(
    r"^(?:\[(?:rank|default)\d+\]:\s*)?((?:[\w.]+\.)?(?:[A-Z]\w*)?(?:Error|Exception|Interrupt)): (.*)$"
)
# These errors follow when another rank has gone; they do not name the cause.
_ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "ChildFailedError",
    "SignalException",
    "Broken pipe",
)
# nvidia-resiliency-ext's rank monitor, before it ends its rank.
_HUNG = re.compile(r"RankMonServer\d+@(\S+):(\d+)\] Did not get (?:initial|subsequent) heartbeat\. ?Waited ([\d.]+)")
_LONGEST = 400
_FULL_BYTES = 1 << 20
_KNOWN = {
    r"KeyError: .optimizer\.distributed\..* from model not in state dict": (
        "the checkpoint's optimizer state is of another TP or PP; save it with "
        "trainer.strategy.ckpt_optim_fully_reshardable=True to change them between attempts"
    ),
}
"""Errors whose words do not tell what to do, and what they mean."""


@dataclass(frozen=True)
class Diagnosis:
    """Why an attempt failed: `cause` in one line; `known` is False when the logs name none."""

    cause: str
    known: bool = True


def why(folder: RunFolder, attempt: Attempt) -> Diagnosis:
    """The first cause that can be named: a full disk, a rank that hung, the error a log ends with, a rank killed."""
    if cause := _full_disk(folder, attempt):
        return Diagnosis(cause)
    for cause_in in (_hung_ranks, _named_error, _killed_rank, _launcher_words):
        if cause := cause_in(attempt):
            return Diagnosis(cause)
    return Diagnosis(f"the job ended without saying why; its logs are in {attempt.path / 'logs'}", known=False)


def _full_disk(folder: RunFolder, attempt: Attempt) -> str:
    free = shutil.disk_usage(folder.path).free
    if free >= _FULL_BYTES and not _mentions(attempt, "No space left on device"):
        return ""
    return f"the disk under {folder.path} is full ({free / 2**20:.0f} MiB free): make room, then resume"


def _hung_ranks(attempt: Attempt) -> str:
    hung = [match for log in attempt.logs if (match := _HUNG.search(_tail(log)))]
    if not hung:
        return ""
    ranks = ", ".join(f"rank {match[2]} on {match[1]}" for match in hung)
    return f"no heartbeat of {ranks} for {float(hung[0][3]):.0f} s, longer than it may take: ended (fault_tolerance)"


def _named_error(attempt: Attempt) -> str:
    for log in [*attempt.logs, *_launcher_logs(attempt)]:
        if error := _last_error(log):
            meanings = [meaning for pattern, meaning in _KNOWN.items() if re.match(pattern, error)]
            return f"{meanings[0] if meanings else error[:_LONGEST]} ({_where(log, attempt)})"
    return ""


def _killed_rank(attempt: Attempt) -> str:
    for log in _launcher_logs(attempt):
        if killed := re.search(r"(?:rank\s*:\s*(\d+) .*\n\s*)?exitcode\s*:\s*-9 \(pid: (\d+)\)", _tail(log)):
            rank = f"rank {killed[1]}" if killed[1] else "a rank"
            return f"{rank} was killed (pid {killed[2]}, signal 9; the kernel does that when memory runs out)"
    return ""


def _launcher_words(attempt: Attempt) -> str:
    """The last line with a word in it that torchrun wrote."""
    for log in _launcher_logs(attempt):
        if lines := [line.strip(" │╭╮╰╯─") for line in _tail(log).splitlines() if re.search(r"[a-z]{3}", line)]:
            return f"{lines[-1][:_LONGEST]} ({_where(log, attempt)})"
    return ""


def _mentions(attempt: Attempt, text: str) -> bool:
    return any(text in _tail(log) for log in [*attempt.logs, *_launcher_logs(attempt)])


def _launcher_logs(attempt: Attempt) -> list[Path]:
    """What torchrun wrote, and the ranks before they had logs of their own."""
    return sorted((attempt.path / "nemo_run").glob("**/std*.log"))


def _last_error(log: Path) -> str:
    errors = [m for line in _tail(log).splitlines() if (m := _ERROR.match(line))]
    causes = [m for m in errors if not any(echo in m[0] for echo in _ECHOES)]
    # The last one: chained tracebacks end with the error that left the program.
    return f"{causes[-1][1].rpartition('.')[2]}: {causes[-1][2]}" if causes else ""


def _where(log: Path, attempt: Attempt) -> str:
    return str(log.relative_to(attempt.path.parent.parent))


def _tail(log: Path, size: int = 64 * 1024) -> str:
    with log.open("rb") as f:
        f.seek(0, 2)
        f.seek(max(0, f.tell() - size))
        return f.read().decode(errors="replace")
