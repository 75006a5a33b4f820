"""What the lines of one log tell: signs of causes, errors of the program, how far the training came and how it ended.

Standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from superpod.diagnosis.causes import ALL, BY_NAME, ECHO, HINT, LIKELY, PROGRAM, WITH_TOPIC, Cause, Sign, topic
from superpod.diagnosis.log_lines import LogLine, scan, time_of
from superpod.diagnosis.log_patterns import GENERIC_ERROR, LOGGER_PREFIX, Level, TaskEnd, error_in, is_quoted, level_of
from superpod.diagnosis.losses import GOOD_STEPS, Series

MOST_EVENTS = 60
"""Events of one cause and rank that are kept: the first ones, and the last."""

MOST_FRAMES = 30
"""Frames of a traceback that are kept, the innermost ones."""

LAST_LINES = 5
"""Lines at the end of a log in which an error that no cause explains, or a cause named in passing, counts."""

PASSING = 0
"""How sure a line is that names a cause in passing and calls itself no error."""

_EXITS = ("SystemExit", "GeneratorExit", "Warning")
_NO_ERRORS = (*_EXITS, "KeyboardInterrupt")
_ECHOES = (
    "ChildFailedError",
    "SignalException",
    "CalledProcessError",
    "ProcessRaisedException",
    "ProcessExitedException",
)
"""Errors of launchers: they say that a process failed, not why."""
_LAUNCHER_ERROR = re.compile(
    r"\bfailed to run\b|\bCaught \w+ in (?:DataLoader worker|replica)\b|\bexit (?:code|status) -?\d+"
    r"|\b(?:command|process|rank|worker|child|job|task|run)\b.*\b(?:exit|return)\w*\b.*\b(?:code|status)\b",
    re.IGNORECASE,
)
"""The same in a message, also of processes of PyTorch's that passed an error on."""
_FINISHED = re.compile(
    r"`Trainer\.fit` stopped: `max_|\[after training is done\]|^\[?exiting program at iteration"
    r"|'train_runtime'|reached (?:the )?max_steps|\bdone: \S+ at step \d+"
)
"""Only a training that came to its end prints it."""
_SAYS_FINISHED = re.compile(
    r"[Tt]raining (?:is )?(?:completed|finished|complete|done)\b|[Tt]raining run finished|^training done"
    r"|\bexit(?:ed)?(?: with)?(?: exit)?[ _]code:? 0\b"
)
"""A script may print it whatever became of the training."""
_OF_STEPS = re.compile(r"\b(?:iteration|step|Step)[:= ]+(\d+)\s*/\s*(\d+)\b")
"""The step of a line and the number of steps in all: the last step is the end of the training."""
_SAYS_ERROR = re.compile(
    r"Error response from|Non-OK-status|\bCheck failed: "
    r"|(?:^|[\s\[(:|])(?:ERROR|Error|error|FATAL|Fatal|fatal|CRITICAL|Critical|E|F)"
    r"(?:[:\]|]|\s[-|]|\s\d|\d{3}|[ ](?=[A-Z\[]))"
)
"""A line that calls itself an error, which is more than naming one."""
_SAYS_FAILED = re.compile(
    r"\bfail(?:ed|ure)\b(?! to\b| *[:=]? *0)|\b(?:aborted|core dump|crashed|panicked|error occurred)", re.IGNORECASE
)
"""The same of the last lines of a log, with which no training ends that goes on."""
_NAMES_ERROR = re.compile(
    r"\b(?:\w*error|\w+Exception|unhandled exception|exception (?:in|occurred))\b(?! *[:=] *[\d.])", re.IGNORECASE
)
"""The same of the very last line."""
_SOURCE = re.compile(r'^\s*File "(.*)", line \d+(?:, in (\S+))?|^\s*frame #\d+|^[│|]\s+(?:❱\s*)?\d+ ')
_IN_HANDLING = re.compile(r"During handling of the above exception, another exception occurred")
_RAISE = re.compile(r"^\s*raise ([\w.]+)\((?:[fr]*[\"'])?(.*?)[\"')]*$")
_PATHS = re.compile(r"[\w.:'\"]*/\S*/\S*")
"""Paths and addresses, whose words are no topics."""
_KEY = re.compile(r"^KeyError: \S+$")
"""A missing key, whose words are none either."""
_CONTINUES = 14
"""Lines after an error's that may belong to its message."""
_FIRST_FAILURE = re.compile(r"Root Cause \(first observed failure\)")
_ELASTIC_RANK = re.compile(r"^\s*rank\s*:\s*(\d+) \(local_rank: (\d+)\)")
_ENDS_OTHERS = re.compile(
    r"^srun: error|sigkill_handler\] Killing subprocess|Sending process \d+ closing signal SIGTERM"
)
_ENDED_STEP = re.compile(r"^slurmstepd: error: \*\*\* (?:STEP|JOB) \S+ ON")
_BY_SIGNAL = ("rank_killed", "rank_crashed")
"""Causes whose signs say that a process died by a signal."""
_EXIT = re.compile(r"^\s*exitcode\s*:\s*(-?\d+)")
_EXIT_CODE = re.compile(
    r"(?:exited with (?:exit )?(?:code|status)|exit(?:ed)? (?:code|status)|return(?:ed|s)?(?: exit)? code"
    r")\s*[:=]?\s*(?!0\b)(-?\d+)",
    re.IGNORECASE,
)
_BY_FIRST: dict[str, list[tuple[Cause, Sign]]] = {}


@dataclass(frozen=True)
class Event:
    """A line that has a sign of a cause, or an error that none explains (`cause` is then ERROR_OF_PROGRAM)."""

    cause: str
    sure: int
    alone: bool
    line: LogLine
    is_error: bool
    """whether it is the last line of a traceback, or the like"""
    order: int
    rank: int | None = None
    words: str = ""
    ended_by: LogLine | None = None
    """the line of another exception, raised while this one was handled, with which the program ended"""
    detail: str | None = None
    """its figures, as a sentence, of an event that no log line has"""


ERROR_OF_PROGRAM = "program_error"


@dataclass
class LogEvents:
    """All of one log."""

    path: Path
    events: list[Event] = field(default_factory=list)
    series: Series = field(default_factory=Series)
    finished: LogLine | None = None
    first_failed: int | None = None
    """the rank that torchrun says failed first"""
    tasks: list[TaskEnd] = field(default_factory=list)
    """in the order in which srun saw them end"""
    first_task: LogLine | None = None
    """srun's line of the first rank that ended by itself"""
    failed: bool = False
    """whether a launcher says that the program failed"""
    fatal: LogLine | None = None
    """the newest line of an error that was not caught, a death by a signal, or a launcher's word of a failure"""
    exit_code: int | None = None
    last: LogLine | None = None
    lines: int = 0
    damaged_after: int | None = None
    """after how many lines the log can be read no further: its archive is cut off or damaged"""
    _counts: dict[tuple[str, int | None], int] = field(default_factory=dict)
    _in_block: bool = False
    _is_ignored: bool = False
    """whether Python ignores the error of the traceback that is being read"""
    _frame: str = ""
    """the file of the newest frame of a traceback"""
    _frames: list[str] = field(default_factory=list)
    """the newest frames of the traceback that is being read, each as `file function: source`"""
    _skip: int = -LAST_LINES
    """the number of a line of source in a traceback, which is no message"""
    _errors: dict[int | None, LogLine] = field(default_factory=dict)
    """by rank, the line of its newest error"""
    _handled: dict[int | None, list[LogLine]] = field(default_factory=dict)
    """by rank, the lines of errors that were being handled when the traceback that is being read began"""
    _block_rank: int | None = None

    _raised: LogLine | None = None
    """the newest `raise` statement that a traceback shows"""
    _source: str = ""
    """the newest line of source that a traceback shows"""
    _error_line: LogLine | None = None
    """the newest line that calls itself an error"""
    _failure_line: LogLine | None = None
    """the newest line that speaks of a failure"""

    @property
    def error_at_end(self) -> LogLine | None:
        """A line among the last ones that calls itself an error, where no end of the training is known."""
        error = max(self._error_line, self._failure_line, key=lambda line: line.number if line else -1)
        if self.last and not level_of(self.last.text) and _NAMES_ERROR.search(self.last.text):
            error = self.last
        if error is None or self.last is None or error.number < self.last.number - LAST_LINES:
            return None
        if self.finished and not ("Traceback" in error.text and error.number > self.finished.number):
            return None
        return error

    @property
    def damage(self) -> str:
        """That the log can be read no further, in words; '' where it ends well."""
        if self.damaged_after is None:
            return ""
        return f"the archive is cut off or damaged after {self.damaged_after:,} lines"

    def look(self, line: LogLine) -> bool:
        """Take a line; whether it tells anything."""
        self.lines += 1
        text = line.text
        if not text.strip():
            return False
        if frame := _SOURCE.match(text):
            self._skip, self._frame = line.number + 1, frame[1] or ""
            self._frames = [*self._frames[-MOST_FRAMES:], f"{_module(frame[1] or '')} {frame[2]}"]
            return True
        if "Traceback (most recent call last)" in text:
            self._is_ignored = "Exception ignored in" in line.before
            self._frames, self._error_line = [], self._error_line if self._is_ignored else line
        if _IN_HANDLING.search(text) and line.rank in self._errors:
            self._handled.setdefault(line.rank, []).append(self._errors.pop(line.rank))
        if line.number == self._skip and text.startswith("    "):
            self._source = text.strip()
            self._frames[-1] += f": {self._source}"
            self._raised = line if self._source.startswith("raise ") else None
            return True
        self.last = line
        if not level_of(text) and _SAYS_FAILED.search(text):
            self._failure_line = line
        if error_in(line, self._ends_traceback(line)) is None and self._take_step(line):
            return True
        if self._says_finished(text):
            self._take_end(line)
        launcher = self._take_launcher(line)
        return self._take_signs(line) or launcher

    def _take_step(self, line: LogLine) -> bool:
        """Take a line of a step, which may be the first of another run, and the last of all; whether it is one."""
        runs = self.series.runs
        is_step = self.series.take(line)
        if self.series.runs > runs:
            self.finished = None
        if (steps := _OF_STEPS.search(line.text)) and steps[1] == steps[2]:
            self._take_end(line)
        return is_step

    def _take_end(self, line: LogLine) -> None:
        self.finished = line
        self.series.end()

    def _says_finished(self, text: str) -> bool:
        """Whether a line tells the end of the training: a phrase that a script prints does not, after a fatal end."""
        if level_of(text) is Level.WARNING:
            return False
        if _FINISHED.search(text):
            return True
        if not _SAYS_FINISHED.search(text):
            return False
        return self.fatal is None or self.series.went_on_after(self.fatal.number)

    def finish(self) -> None:
        """Take what only the end of the log shows: a cut-off traceback, and an error that is no exception."""
        if self._raised and (self.last is None or self._raised.number > self.last.number):
            self._take_signs(replace(self._raised, text=_RAISE.sub(r"\1: \2", self._raised.text)))
        error = self.error_at_end
        if (
            error
            and "Traceback" not in error.text
            and not any(e.is_error or e.sure > HINT or e.line.number == error.number for e in self.events)
        ):
            self._add_error(error, LOGGER_PREFIX.sub("", error.text), has_sign=False)

    def _take_launcher(self, line: LogLine) -> bool:
        text = line.text
        if _FIRST_FAILURE.search(text):
            self._in_block = True
            self._take_failure(line)
        elif match := _ELASTIC_RANK.match(text):
            self._block_rank = int(match[1])
            if self._in_block:
                self.first_failed, self._in_block = self._block_rank, False
        elif end := TaskEnd.parse(text):
            self.tasks.append(end)
            self.failed = True
            if not end.was_terminated:
                self.first_task = self.first_task or line
                self._take_failure(line)
        elif match := _EXIT.match(text):
            if int(match[1]):
                self._take_failure(line)
        elif "ChildFailedError" in text or "CalledProcessError" in text or _ENDS_OTHERS.search(text):
            self._take_failure(line)
        elif (match := _EXIT_CODE.search(text)) and level_of(text) is not Level.INFO:
            self.exit_code = int(match[1])
            self._take_failure(line)
        else:
            return False
        return True

    def _take_failure(self, line: LogLine) -> None:
        """Take that a launcher says that the program failed, which counts more than that the training has ended."""
        self.failed, self.finished, self.fatal = True, None, line

    def _take_signs(self, line: LogLine) -> bool:
        text = line.text.strip(" │╭╮╰╯─") if "│" in line.text else line.text
        error = self._error_of(line)
        is_error = error is not None
        if error and ":" not in text:
            text = f"{error} ({'/'.join(Path(self._frame).parts[-2:])})"
        lowered, level = text.lower(), level_of(text)
        says = "NCCL WARN" in text or "Assertion `" in text or bool(_SAYS_ERROR.search(text))
        strong = is_error or (not level and (says or self._continues(line)))
        self._note_error(line, error, says, level)
        frames = "\n".join(self._frames) if is_error else ""
        telling = False
        for cause, sign in _candidates(lowered):
            if not sign.matches(text, lowered, frames):
                continue
            telling = True
            is_passing = bool(level) and not sign.any_level and not is_error
            if not is_passing and (strong or sign.any_level or cause.depth != PROGRAM):
                sure = min(sign.sure, HINT) if error and is_quoted(cause, sign, error) else sign.sure
                self._add(cause.name, sure, sign.alone, line, strong)
            else:  # named in passing: `Cannot import zarr ... ModuleNotFoundError`, and the run goes on
                self._add(cause.name, PASSING, False, line, False)
        if error and not (telling and self._explained(line)):
            telling |= self._add_error(line, error, has_sign=telling)
        return telling

    def _error_of(self, line: LogLine) -> str | None:
        """The error that a line ends with, unless Python ignores it; of a bare name with what was asserted."""
        ends_traceback = self._ends_traceback(line)
        error = error_in(line, ends_traceback)
        if error and self._is_ignored:
            self._is_ignored = False
            return None
        is_bare = error and ":" not in error and ends_traceback
        return f"{error}: {self._source}" if is_bare and self._source.startswith("assert ") else error

    def _note_error(self, line: LogLine, error: str | None, says: bool, level: Level | None) -> None:
        """Note a line that ends with an error, that calls itself one, or with which a process or a step ends."""
        name = (error or "").partition(":")[0]
        if error is not None:
            self._take_last_of_chain(line, name)
        if (error and not name.endswith(_NO_ERRORS)) or (says and not level):
            self._error_line = line
        if (error and not name.endswith(_EXITS) and not level) or _ENDED_STEP.search(line.text):
            self.fatal = line

    def _take_last_of_chain(self, line: LogLine, name: str) -> None:
        """Take a new error: it ended the program, rather than those that were being handled when it was raised."""
        if line.rank in self._errors:  # no traceback of a chain
            self._handled.pop(line.rank, None)
        self._errors[line.rank] = line
        handled = {e.number for e in self._handled.get(line.rank, []) if _name(error_in(e, True)) != _name(name)}
        if handled:
            self.events = [replace(e, ended_by=line) if e.line.number in handled else e for e in self.events]

    def _ends_traceback(self, line: LogLine) -> bool:
        """Whether the line stands behind the last frame of a traceback, its source and its marks."""
        return 0 <= line.number - self._skip <= 2

    def _continues(self, line: LogLine) -> bool:
        """Whether the line may belong to the message of an error above it."""
        newest = self._errors.get(line.rank)
        return newest is not None and line.number - newest.number <= _CONTINUES and not time_of(line.text)

    def _explained(self, line: LogLine) -> bool:
        """Whether a cause that is no mere hint stands for this very line."""
        return any(e.line.number == line.number and e.sure > HINT for e in self.events[-8:])

    def _add_error(self, line: LogLine, error: str, has_sign: bool) -> bool:
        name = error.partition(":")[0].rpartition(".")[2]
        if name in _ECHOES or _LAUNCHER_ERROR.search(error):
            self._take_failure(line)
            return True
        if name.endswith(_NO_ERRORS):
            return False
        tells_nothing = has_sign or GENERIC_ERROR.search(error)
        spoken = "" if _KEY.search(error) else _PATHS.sub("", error)
        if not tells_nothing and (cause := topic(WITH_TOPIC, spoken, self._frames)):
            self._add(cause.name, HINT, True, line, True)
        self._add(ERROR_OF_PROGRAM, LIKELY, True, line, True, error)
        return True

    def _add(self, cause: str, sure: int, alone: bool, line: LogLine, is_error: bool, words: str = "") -> None:
        if cause in _BY_SIGNAL and sure > PASSING:
            self.fatal = line
        rank = line.rank
        if rank is None and self._block_rank is not None and _EXIT.match(line.text):
            rank = self._block_rank
        key = (cause, rank)
        self._counts[key] = self._counts.get(key, 0) + 1
        event = Event(cause, sure, alone, line, is_error, self.lines, rank, words)
        if self._counts[key] > MOST_EVENTS:
            at = max(i for i, e in enumerate(self.events) if (e.cause, e.rank) == key)
            del self.events[at]
        self.events.append(event)

    def is_recovered(self, event: Event) -> bool:
        """Whether the training went on after the event, or had ended well before it."""
        if self.series.steps_after(event.line.number) >= GOOD_STEPS:
            return True
        if self.finished is None:
            return False
        if event.line.number <= self.finished.number:
            return True
        if event.cause == "nccl_timeout":  # ranks that wait for each other at the end: the job fails half an hour later
            return False
        return not event.is_error or event.sure <= HINT or _depth(event.cause) <= ECHO


def read(path: Path, tail: int = 0) -> LogEvents:
    """What a log tells; of its last `tail` bytes only, where that is given. Raises OSError."""
    events = LogEvents(path)
    events.damaged_after = scan(path, events.look, tail)
    events.finish()
    return events


def _name(error: str | None) -> str:
    """The type of an error, without its module."""
    return (error or "").partition(":")[0].rpartition(".")[2]


def _module(file: str) -> str:
    """The part of a frame's path that says what the code is: inside of its package, or the file and its folder."""
    _, is_package, inside = file.rpartition("-packages/")
    return f"/{inside if is_package else '/'.join(file.split('/')[-2:])}"


def _depth(cause: str) -> int:
    return BY_NAME[cause].depth if cause in BY_NAME else PROGRAM


def _candidates(lowered: str) -> list[tuple[Cause, Sign]]:
    """The signs whose words may be in a line, by their first letters."""
    if not _BY_FIRST:
        for cause in ALL:
            for sign in cause.signs:
                _BY_FIRST.setdefault(sign.words[:3], []).append((cause, sign))
    return [pair for start, pairs in _BY_FIRST.items() if start in lowered for pair in pairs]
