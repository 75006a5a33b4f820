"""Why a job failed, in one line, from the ranks' logs and the disk."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from superpod.node.rank_logs import is_by_node, rank_of, tails
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
# What srun prints when a task ends badly: node, tasks (which are ranks), and strsignal(3) or the exit code.
_TASK_EXIT = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (.+?)(?: \(core dumped\))?$", re.MULTILINE)
_SIGNALS = {"Killed": 9, "Segmentation fault": 11, "Bus error": 7, "Aborted": 6, "Illegal instruction": 4}
_KILLED = ("Killed", "Out Of Memory")
# slurmstepd, when Slurm ends a step for a reason of its own; a scancel has no reason.
_STEP_END = re.compile(r"\*\*\* STEP \S+ ON (\S+) CANCELLED AT (\S+) DUE TO ([A-Z ]+?) \*\*\*")
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
    """The first cause that can be named: a full disk, a rank that hung or was killed, the error a log ends with."""
    logs = _read(attempt)
    if cause := _full_disk(folder, logs) or _hung_ranks(logs) or _killed_first(attempt) or logs.error:
        return Diagnosis(cause)
    if cause := _killed_rank(attempt) or _first_task(attempt) or logs.step_end or _launcher_words(attempt):
        return Diagnosis(cause)
    return Diagnosis(f"the job ended without saying why; its logs are in {attempt.path / 'logs'}", known=False)


@dataclass
class _Logs:
    """What the ends of all logs tell. Read once: those of 2,048 nodes are 1 GiB."""

    says_full: bool = False
    hung: dict[tuple[str, str, str], None] = field(default_factory=dict)
    """host, rank and seconds of silence of ranks that fault tolerance has ended"""
    error: str = ""
    """the error that the first log with any ends with"""
    step_end: str = ""


def _read(attempt: Attempt) -> _Logs:
    logs = _Logs()
    for log in [*attempt.logs, *_launcher_logs(attempt)]:
        for rank, text in tails(log):
            logs.says_full |= "No space left on device" in text
            logs.hung |= dict.fromkeys(_HUNG.findall(text))  # the monitors of a node write without a rank
            logs.error = logs.error or _named_error(log, rank, text, attempt)
            logs.step_end = logs.step_end or _step_end(log, text)
    return logs


def _full_disk(folder: RunFolder, logs: _Logs) -> str:
    free = shutil.disk_usage(folder.path).free
    if free >= _FULL_BYTES and not logs.says_full:
        return ""
    return f"the disk under {folder.path} is full ({free / 2**20:.0f} MiB free): make room, then resume"


def _hung_ranks(logs: _Logs) -> str:
    if not logs.hung:
        return ""
    ranks = ", ".join(f"rank {rank} on {host}" for host, rank, _ in logs.hung)
    waited_s = float(next(iter(logs.hung))[2])
    return f"no heartbeat of {ranks} for {waited_s:.0f} s, longer than it may take: ended (fault_tolerance)"


def _named_error(log: Path, rank: int | None, text: str, attempt: Attempt) -> str:
    if not (error := _last_error(text)):
        return ""
    meanings = [meaning for pattern, meaning in _KNOWN.items() if re.match(pattern, error)]
    whose = f", rank {rank}" if is_by_node(log) and rank is not None else ""
    return f"{meanings[0] if meanings else error[:_LONGEST]} ({_where(log, attempt)}{whose})"


def _killed_first(attempt: Attempt) -> str:
    """A rank that was killed before srun ended any other: what the others' logs end with follows from it."""
    exits = _task_exits(attempt)
    return _exit_words(*exits[0]) if exits and exits[0][2] in _KILLED else ""


def _first_task(attempt: Attempt) -> str:
    """The task that srun saw end first, and how; a log of its own names no cause.

    A Python that raised, and whose log names only that another rank has gone, is no cause: a task that was killed is,
    though srun may hear of it later.
    """
    exits = [task for task in _task_exits(attempt) if task[2] != "Terminated"]
    killed = [task for task in exits if task[2] in _KILLED]
    raised = bool(exits) and exits[0][2] == "Exited with exit code 1"
    return next((_exit_words(*task) for task in (killed if raised and killed else exits)), "")


def _task_exits(attempt: Attempt) -> list[tuple[str, str, str]]:
    """Node, tasks and how they ended, in the order that srun saw: `srun: error: node2: tasks 2-3: Killed`."""
    log = attempt.path / "logs" / "srun.log"
    return _TASK_EXIT.findall(_tail(log)) if log.is_file() else []


def _exit_words(node: str, tasks: str, how: str) -> str:
    several = not tasks.isdecimal()
    who = f"rank{'s' if several else ''} {tasks} on {node}"
    if signal := _SIGNALS.get(how):
        cause = "; the kernel does that when memory runs out" if how == "Killed" else ""
        return f"{who} {'were' if several else 'was'} ended by signal {signal} ({how}{cause})"
    if how == "Out Of Memory":
        return f"{who} needed more memory than Slurm gives the job (Out Of Memory)"
    return f"{who} {how[0].lower()}{how[1:]}"


def ended_step(attempt: Attempt) -> str:
    """Why Slurm itself ended the ranks: `*** STEP 7.0 ON node1 CANCELLED AT ... DUE TO NODE FAILURE ***`."""
    return next((end for log in attempt.logs for _, text in tails(log) if (end := _step_end(log, text))), "")


def _step_end(log: Path, text: str) -> str:
    # It reaches srun, or the file of a node whose output srun does not carry.
    match = _STEP_END.search(text) if rank_of(log) is None else None
    return f"Slurm ended the ranks on {match[1]} at {match[2]}: {match[3].lower()}" if match else ""


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


def _launcher_logs(attempt: Attempt) -> list[Path]:
    """What torchrun wrote, and the ranks before they had logs of their own."""
    return sorted((attempt.path / "nemo_run").glob("**/std*.log"))


def _last_error(text: str) -> str:
    errors = [m for line in text.splitlines() if (m := _ERROR.match(line))]
    causes = [m for m in errors if not any(echo in m[0] for echo in _ECHOES)]
    # The last one: chained tracebacks end with the error that left the program.
    return f"{causes[-1][1].rpartition('.')[2]}: {causes[-1][2]}" if causes else ""


def _where(log: Path, attempt: Attempt) -> str:
    return str(log.relative_to(attempt.path.parent.parent))


def _tail(log: Path) -> str:
    return "\n".join(text for _, text in tails(log))
