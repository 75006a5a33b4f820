"""Recognize errors, log levels, and the ends of Slurm steps and tasks in single log lines. Standard library only."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from superpod.diagnosis.causes import MACHINE_CAUSES, Cause, Pattern
from superpod.diagnosis.log_lines import LogLine

ERROR = re.compile(
    r"^(?:E\s+)?((?:[A-Za-z_][\w]*\.)*(?:[A-Z_]\w*)?(?:Error|Exception|Interrupt|Timeout|Failure|StopIteration|Exit"
    r"|Cancelled|Fault|Expired|Warning|gaierror))(?::\s*(.*))?$"
)
_VALUE_ERRORS = (
    *("ValueError", "TypeError", "KeyError", "IndexError", "AttributeError", "NameError", "AssertionError"),
    *("NotImplementedError", "ZeroDivisionError"),
)
"""Errors that Python code raises for invalid values: a machine failure in their messages is only quoted."""
_NAME = re.compile(r"^((?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?::\s+(.*))?$")
_WHAT = re.compile(r"^\s*what\(\):\s+(.*)$")
GENERIC_ERROR = re.compile(
    r"'NoneType' object|^AssertionError(?:: assert |$)|^Error(?: executing|: *\d|$)"
    r"|^(?:KeyError|TypeError|ValueError|RuntimeError)$"
    r"|\b(?:after|for) \d+ (?:times|tries|attempts|retries)\b|\bretries\b"
)
"""Errors that follow from an earlier problem, but do not name it."""
ERROR_LEVEL = re.compile(
    r"Error response from|Non-OK-status|\bCheck failed: "
    r"|(?:^|[\s\[(:|])(?:ERROR|Error|error|FATAL|Fatal|fatal|CRITICAL|Critical|E|F)"
    r"(?:[:\]|]|\s[-|]|\s\d|\d{3}|[ ](?=[A-Z\[]))"
)
"""A line of level ERROR, as opposed to a line that only mentions an error."""
REPORTS_FAILURE = re.compile(
    r"\bfail(?:ed|ure)\b(?! to\b| *[:=]? *0)|\b(?:aborted|core dump|crashed|panicked|error occurred)", re.IGNORECASE
)
"""A line that reports a failure; it counts only among the last lines of a log."""
NAMES_ERROR = re.compile(
    r"\b(?:\w*error|\w+Exception|unhandled exception|exception (?:in|occurred))\b(?! *[:=]? *[\d.])", re.IGNORECASE
)
"""A line that mentions an error; it counts only as the last line of a log."""
MAY_BE_ERROR = re.compile(
    r"\b(?:traceback|fatal|panic|killed|aborted|crash(?:ed)?|core dumped|segmentation fault|out of memory"
    r"|terminate called|assertion|invalid pointer|corrupted|not found|no such|cannot|could ?n[o']t|unable to|non-?zero"
    r"|fail(?:ed|ure)s?(?! *[:=]? *0\b))\b",
    re.IGNORECASE,
)
"""A line that may report an error of any program; if training reports its end after it, the end may be abnormal."""
NORMAL_AT_END = re.compile(
    r"\*\*\* (?:STEP|JOB) |: Terminated$|TCPStore|Broken pipe|connection (?:reset|closed)", re.IGNORECASE
)
"""Messages that also appear when processes are terminated after a normal end of training."""
_WARNING = re.compile(
    r"^(?:\[NeMo W|\[W[\d ]|W\d{4} |WARN|\(?\w*Warning\b)|^\S{0,40}\s?(?:-\s)?\bWARN(?:ING)?\b(?!.*NCCL WARN)"
    r"|\b(?:\w+Warning|warnings?\.warn)\b"
    r"|\[WARN(?:ING)?\]|\bWARNING\s*[-:|\]]|level=warn"
)
_INFORMATION = re.compile(
    r"^(?:\[NeMo [ID]|\[I[\d ]|I\d{4} |INFO|DEBUG)|\[INFO\]|\bINFO\s*[-:|\]]| - INFO - |NCCL INFO|level=info"
    r"|\bDEBUG\s*[-:|\]]"
)
LOGGER_PREFIX = re.compile(
    r"^(?:\[[^\[\]]{1,80}\]:?\s*"
    r"|(?:\d{4}-)?\d\d-\d\d[ T][\d:,.]+\s*"
    r"|[EF]\d{4} [\d:.]+ +\d+ (?=\S+\])"
    r"|(?:CRITICAL|FATAL|ERROR|Error|ERR)\b(?!:)[\s|-]+"
    r"|(?:CRITICAL|FATAL|ERROR):\s+(?=[A-Z][\w.]*(?:Error|Exception)\b|Traceback)"
    r"|[-|]\s+|[\w./]+\.\w+:\d+\s*[:|-]?\s+|[\w./-]+\.\w+:\d+\]\s+)+(?=\S)"
)
"""The prefix that a logger adds: time, level, module and line."""


class Level(enum.Enum):
    """Log levels below ERROR."""

    WARNING = enum.auto()
    INFO = enum.auto()


def level_of(text: str) -> Level | None:
    """Return the log level of a line; None if it is ERROR or above, or if the line has no level."""
    start = text[:160]
    if _INFORMATION.search(start):
        return Level.INFO
    if _WARNING.search(start) and "NCCL WARN" not in start:
        return Level.WARNING
    return None


def find_error(line: LogLine, ends_traceback: bool = False) -> str | None:
    """Return the error in a line, like `Name: message` or `Name`; None if the line is not the end of a traceback.

    If the line follows the frames of a traceback (`ends_traceback`), any class name counts as an error; otherwise, only
    a name such as `*Error`.
    """
    text = LOGGER_PREFIX.sub("", line.text.strip(" │|").lstrip("\"'`>* "))
    match = ERROR.match(text)
    if match is None and ends_traceback:
        match = _NAME.match(line.text)
    if match:
        name, message = match[1], (match[2] or "").strip()
        if name.endswith("Warning") and not ends_traceback:
            return None
        if not message and " " in line.before.strip() and line.before[:1] in " \t[0123456789":
            message = line.before.strip()[-200:]
        return f"{name}: {message}" if message else name

    match = _WHAT.match(line.text)
    return f"terminate called: {match[1].strip()}" if match else None


def is_quoted(cause: Cause, pattern: Pattern, error: str) -> bool:
    """Return whether an error about invalid values only quotes the machine failure `cause` that `pattern` matches."""
    name, _, message = error.partition(": ")
    inner_error = ERROR.match(message)
    while inner_error:  # `ValueError: OSError: [Errno 28] ...` re-raises an error
        name, message = inner_error[1], inner_error[2] or ""
        inner_error = ERROR.match(message) if message else None
    is_value_error = name.rpartition(".")[2] in _VALUE_ERRORS
    return is_value_error and cause.name in MACHINE_CAUSES and not message.lower().startswith(pattern.phrase)


_STEP_END = re.compile(r"\*\*\* STEP \S+ ON (\S+) CANCELLED AT (\S+) DUE TO ([A-Z ]+?)(?:,[^*]*)? \*\*\*")
_TASK_END = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (.+?)(?: \(core dumped\))?$")
_SIGNALS = {"Killed": 9, "Segmentation fault": 11, "Bus error": 7, "Aborted": 6, "Illegal instruction": 4}


def step_end(text: str) -> str | None:
    """Return a sentence on why Slurm ended a step, from a line of slurmstepd.

    Return None for other lines, and after scancel, for which slurmstepd logs no reason.
    """
    match = _STEP_END.search(text)
    return f"Slurm ended the ranks on {match[1]} at {match[2]}: {match[3].lower()}" if match else None


@dataclass(frozen=True)
class TaskEnd:
    """The end of one or more tasks on a node, from a line of srun: `srun: error: node2: task 3: Killed`."""

    node: str
    tasks: str
    """the ranks, such as `3` or `0-7,9`"""
    how: str
    """srun's description of the end, such as `Killed` or `Exited with exit code 1`"""

    @classmethod
    def parse(cls, text: str) -> TaskEnd | None:
        """Return the end of tasks that a line reports; None if it is not such a line of srun."""
        match = _TASK_END.match(text)
        return cls(match[1], match[2], match[3]) if match else None

    @property
    def rank(self) -> int | None:
        """The rank; None if the line reports several."""
        return int(self.tasks) if self.tasks.isdecimal() else None

    @property
    def was_terminated(self) -> bool:
        """Whether srun terminated the task after another task had failed."""
        return self.how == "Terminated"

    @property
    def is_out_of_memory(self) -> bool:
        """Whether the task exceeded the memory that Slurm allocated to the job."""
        return self.how == "Out Of Memory"

    @property
    def was_killed(self) -> bool:
        """Whether the task was killed by SIGKILL."""
        return self.how == "Killed" or self.is_out_of_memory

    @property
    def exited_with_1(self) -> bool:
        """Whether the task exited with code 1, as Python does after an exception."""
        return self.how == "Exited with exit code 1"

    def describe(self) -> str:
        """Return a sentence such as `rank 3 on node2 was ended by signal 9 (Killed; cause unknown)`."""
        if self.rank is None:
            who, verb = f"ranks {self.tasks} on {self.node}", "were"
        else:
            who, verb = f"rank {self.tasks} on {self.node}", "was"

        number = _SIGNALS.get(self.how)
        if number:
            cause = "; cause unknown" if self.was_killed else ""
            return f"{who} {verb} ended by signal {number} ({self.how}{cause})"
        if self.is_out_of_memory:
            return f"{who} needed more memory than Slurm allocated to the job (Out Of Memory)"
        return f"{who} {self.how[0].lower()}{self.how[1:]}"
