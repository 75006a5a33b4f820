"""Collect the events in one log: lines that match a known cause, program errors, steps, and the end of training.

Standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from superpod.diagnosis.causes import (
    ALL,
    CAUSES_BY_NAME,
    CAUSES_WITH_TOPICS,
    ECHO,
    HINT,
    LIKELY,
    PROGRAM,
    Cause,
    Pattern,
    find_by_topic,
)
from superpod.diagnosis.log_lines import LogLine, scan, time_of
from superpod.diagnosis.log_patterns import (
    ERROR_LEVEL,
    GENERIC_ERROR,
    LOGGER_PREFIX,
    MAY_BE_ERROR,
    NAMES_ERROR,
    NORMAL_AT_END,
    REPORTS_FAILURE,
    Level,
    TaskEnd,
    find_error,
    is_quoted,
    level_of,
)
from superpod.diagnosis.losses import GOOD_STEPS, Series

MAX_EVENTS = 60
"""Maximum number of events to keep per cause and rank: all but one are the first ones, one is the last."""

MAX_FRAMES = 30
"""Maximum number of innermost frames to keep of a traceback."""

LAST_LINES = 5
"""An unexplained error, or a cause that is only mentioned, counts within this many lines from the end of a log."""

MENTION = 0
"""Certainty of a line that mentions a cause, but is not an error."""

_EXITS = ("SystemExit", "GeneratorExit", "Warning")
_NO_ERRORS = (*_EXITS, "KeyboardInterrupt")
_LAUNCHER_ERRORS = (
    *("ChildFailedError", "SignalException", "CalledProcessError", "ProcessRaisedException"),
    "ProcessExitedException",
)
"""Errors of launchers, which report that a process failed, but not why."""
_LAUNCHER_MESSAGE = re.compile(
    r"\bfailed to run\b|\bCaught \w+ in (?:DataLoader worker|replica)\b|\bexit (?:code|status) -?\d+"
    r"|\b(?:command|process|rank|worker|child|job|task|run)\b.*\b(?:exit|return)\w*\b.*\b(?:code|status)\b",
    re.IGNORECASE,
)
"""Messages of such errors, and of PyTorch processes that re-raise an error of another process."""
_FINISHED = re.compile(
    r"`Trainer\.fit` stopped: `max_|\[after training is done\]|^\[?exiting program at iteration"
    r"|'train_runtime'|reached (?:the )?max_steps|\bdone: \S+ at step \d+"
)
"""Lines that are printed only when training has ended."""
_MAY_BE_FINISHED = re.compile(
    r"[Tt]raining (?:is )?(?:completed|finished|complete|done)\b|[Tt]raining run finished|^training done"
    r"|\bexit(?:ed)?(?: with)?(?: exit)?[ _]code:? 0\b"
)
"""Lines that a script may print even if the training failed."""
_STEP_OF_TOTAL = re.compile(r"\b(?:iteration|step|Step)[:= ]+(\d+)\s*/\s*(\d+)\b")
"""A step and the total number of steps: if they are equal, training has ended."""
_SOURCE = re.compile(r'^\s*File "(.*)", line \d+(?:, in (\S+))?|^\s*frame #\d+|^[│|]\s+(?:❱\s*)?\d+ ')
_DURING_HANDLING = re.compile(r"During handling of the above exception, another exception occurred")
_RAISE = re.compile(r"^\s*raise ([\w.]+)\((?:[fr]*[\"'])?(.*?)[\"')]*$")
_QUOTED = re.compile(r"[\w.:'\"]*/\S*/\S*|\{.*\}")
"""Paths, URLs and printed dictionaries, which are not searched for topics."""
_KEY = re.compile(r"^KeyError: (?:\S+$|\()")
"""A missing dictionary key, which is not searched for topics either."""
_MAX_MESSAGE_LINES = 14
"""Maximum number of lines after an error that may belong to its message."""
_FIRST_FAILURE = re.compile(r"Root Cause \(first observed failure\)")
_ELASTIC_RANK = re.compile(r"^\s*rank\s*:\s*(\d+) \(local_rank: (\d+)\)")
_ENDS_OTHERS = re.compile(
    r"^srun: error|sigkill_handler\] Killing subprocess|Sending process \d+ closing signal SIGTERM"
)
_ENDED_STEP = re.compile(r"^slurmstepd: error: \*\*\* (?:STEP|JOB) \S+ ON")
_SIGNAL_CAUSES = ("rank_killed", "rank_crashed")
"""Causes whose patterns match reports that a process was killed by a signal."""
_EXIT = re.compile(r"^\s*exitcode\s*:\s*(-?\d+)")
_EXIT_CODE = re.compile(
    r"(?:exited with (?:exit )?(?:code|status)|exit(?:ed)? (?:code|status)|return(?:ed|s)?(?: exit)? code"
    r")\s*[:=]?\s*(?!0\b)(-?\d+)",
    re.IGNORECASE,
)
_PATTERNS_BY_START: dict[str, list[tuple[Cause, Pattern]]] = {}


@dataclass(frozen=True)
class Event:
    """A line that matches a pattern of a known cause, or an unexplained error (`cause` is then PROGRAM_ERROR)."""

    cause: str
    sure: int
    """certainty: MENTION, HINT, LIKELY or CERTAIN"""
    alone: bool
    """whether the event is sufficient evidence that the run failed"""
    line: LogLine
    is_error: bool
    """whether it is an error, such as the last line of a traceback"""
    order: int
    """number of log lines examined up to this event"""
    rank: int | None = None
    error: str = ""
    """`Name: message`, for PROGRAM_ERROR"""
    ended_by: LogLine | None = None
    """the line of another exception, which was raised while this one was handled, and ended the program"""
    detail: str | None = None
    """a sentence with numbers, for an event that is not a log line"""

    @property
    def is_secondary(self) -> bool:
        """Whether the cause is only a consequence of other causes, such as of the failure of another rank."""
        return self.cause in CAUSES_BY_NAME and CAUSES_BY_NAME[self.cause].depth <= ECHO


PROGRAM_ERROR = "program_error"


@dataclass
class LogEvents:
    """The events and training steps in one log."""

    path: Path
    events: list[Event] = field(default_factory=list)
    series: Series = field(default_factory=Series)
    finished: LogLine | None = None
    """the line that reports the end of training, if no failure was reported after it"""
    first_failed: int | None = None
    """the rank that failed first, according to torchrun"""
    tasks: list[TaskEnd] = field(default_factory=list)
    """the ends of tasks, in the order in which srun reported them"""
    first_task: LogLine | None = None
    """srun's line about the first task that ended without being terminated by srun"""
    failed: bool = False
    """whether a launcher reports that the program failed"""
    fatal: LogLine | None = None
    """the newest line with an uncaught error, a process killed by a signal, or a failure reported by a launcher"""
    exit_code: int | None = None
    """the newest exit code other than 0 that a launcher reports"""
    last: LogLine | None = None
    """the last line that is not part of a traceback's frames"""
    lines: int = 0
    """number of lines examined"""
    damaged_after: int | None = None
    """number of readable lines in a truncated or corrupt archive; None = intact"""
    _counts: dict[tuple[str, int | None], int] = field(default_factory=dict)
    _report: int = 0
    """the number of the newest line in which a launcher reports a failure, which is never the error itself"""
    _in_block: bool = False
    """whether torchrun's block about the first failure has begun, and its rank is still to come"""
    _is_ignored: bool = False
    """whether Python ignores the error of the current traceback"""
    _frame: str = ""
    """the file of the newest frame of the current traceback"""
    _frames: list[str] = field(default_factory=list)
    """the newest frames of the current traceback, each as `file function: source`"""
    _skip: int = -LAST_LINES
    """the number of the newest source line in a traceback, which is not a message"""
    _errors: dict[int | None, LogLine] = field(default_factory=dict)
    """the line of the newest error of each rank"""
    _handled: dict[int | None, list[LogLine]] = field(default_factory=dict)
    """the errors of each rank that were being handled when the current traceback began"""
    _block_rank: int | None = None
    """the rank of torchrun's newest block about a failure"""
    _raised: LogLine | None = None
    """the newest `raise` statement in a traceback"""
    _source: str = ""
    """the newest source line in a traceback"""
    _error_line: LogLine | None = None
    """the newest line of level ERROR"""
    _failure_line: LogLine | None = None
    """the newest line that reports a failure"""
    doubt: LogLine | None = None
    """the newest line since the last step that may report an error"""

    @property
    def error_at_end(self) -> LogLine | None:
        """An error among the last lines, or None; after the end of training, only a later traceback counts."""
        last = self.last
        if last is None:
            return None
        error = max(self._error_line, self._failure_line, key=lambda line: line.number if line else -1)
        if last.number != self._report and not level_of(last.text) and NAMES_ERROR.search(last.text):
            error = last
        if error is None or error.number < last.number - LAST_LINES:
            return None
        if self.finished and not ("Traceback" in error.text and error.number > self.finished.number):
            return None
        return error

    @property
    def damage(self) -> str:
        """A message if the archive of the log is truncated or corrupt; '' if it is intact."""
        if self.damaged_after is None:
            return ""
        return f"the archive is truncated or corrupt after {self.damaged_after:,} lines"

    def process(self, line: LogLine) -> bool:
        """Record the events in a line; return whether later lines of its template may contain events, too."""
        self.lines += 1
        text = line.text
        if not text.strip():
            return False

        frame = _SOURCE.match(text)
        if frame:
            self._skip, self._frame = line.number + 1, frame[1] or ""
            self._frames = [*self._frames[-MAX_FRAMES:], f"{_module(frame[1] or '')} {frame[2]}"]
            return True
        if "Traceback (most recent call last)" in text:
            self._is_ignored = "Exception ignored in" in line.before
            self._frames = []
            if not self._is_ignored:
                self._error_line = line
        if _DURING_HANDLING.search(text) and line.rank in self._errors:
            self._handled.setdefault(line.rank, []).append(self._errors.pop(line.rank))
        if line.number == self._skip and text.startswith("    "):
            self._source = text.strip()
            self._frames[-1] += f": {self._source}"
            self._raised = line if self._source.startswith("raise ") else None
            return True

        self.last = line
        if not level_of(text) and REPORTS_FAILURE.search(text):
            self._failure_line = line
        if find_error(line, self._ends_traceback(line)) is None and self._record_step(line):
            self.doubt = None
            return True
        if self._reports_end(text):
            self._record_end(line)
        self._record_doubt(line)
        is_launcher_report = self._record_launcher_report(line)
        self._report = line.number if is_launcher_report else self._report
        return self._match_patterns(line) or is_launcher_report

    def _record_doubt(self, line: LogLine) -> None:
        """Record a line that may report an error, unless it reports the end of training or Python ignores the error."""
        text = line.text
        if line is self.finished or self._is_ignored or level_of(text) or NORMAL_AT_END.search(text):
            return
        if ERROR_LEVEL.search(text) or NAMES_ERROR.search(text) or MAY_BE_ERROR.search(text):
            self.doubt = line

    def _record_step(self, line: LogLine) -> bool:
        """Record a step that a line reports, which may begin or end a run; return whether the line reports a step."""
        runs = self.series.runs
        is_step = self.series.add_line(line)
        if self.series.runs > runs:
            self.finished = None
        steps = _STEP_OF_TOTAL.search(line.text)
        if steps and steps[1] == steps[2]:
            self._record_end(line)
        return is_step

    def _record_end(self, line: LogLine) -> None:
        self.finished = line
        self.series.end()

    def _reports_end(self, text: str) -> bool:
        """Return whether a line reports the end of training; after a fatal error, a script's own message is ignored."""
        if level_of(text) is Level.WARNING:
            return False
        if _FINISHED.search(text):
            return True
        if not _MAY_BE_FINISHED.search(text):
            return False
        return self.fatal is None or self.series.continued_after(self.fatal.number)

    def finish(self) -> None:
        """Record the error in the last lines of the log: a truncated traceback, or an error without an exception."""
        if self._raised and (self.last is None or self._raised.number > self.last.number):
            self._match_patterns(replace(self._raised, text=_RAISE.sub(r"\1: \2", self._raised.text)))

        error = self.error_at_end
        if error is None:
            return
        if "Traceback" in error.text and self._frames:  # cut off
            error = replace(error, frame=self._frames[-1].lstrip("/"))
        if not any(e.is_error or e.sure > HINT or e.line.number == error.number for e in self.events):
            self._add_error(error, LOGGER_PREFIX.sub("", error.text), is_matched="Traceback" in error.text)

    def _record_launcher_report(self, line: LogLine) -> bool:
        """Record what torchrun, srun or another launcher reports in a line; return whether it is such a report."""
        text = line.text
        if _FIRST_FAILURE.search(text):
            self._in_block = True
            self._record_failure(line)
            return True

        rank = _ELASTIC_RANK.match(text)
        if rank:
            self._block_rank = int(rank[1])
            if self._in_block:
                self.first_failed, self._in_block = self._block_rank, False
            return True

        end = TaskEnd.parse(text)
        if end:
            self.tasks.append(end)
            self.failed = True
            if not end.was_terminated:
                self.first_task = self.first_task or line
                self._record_failure(line)
            return True

        exit_field = _EXIT.match(text)
        if exit_field:
            if int(exit_field[1]):
                self._record_failure(line)
            return True

        if "ChildFailedError" in text or "CalledProcessError" in text or _ENDS_OTHERS.search(text):
            self._record_failure(line)
            return True

        exit_code = _EXIT_CODE.search(text)
        if exit_code and level_of(text) is not Level.INFO:
            self.exit_code = int(exit_code[1])
            self._record_failure(line)
            return True
        return False

    def _record_failure(self, line: LogLine) -> None:
        """Record a line in which a launcher reports a failure; an earlier end of training then does not count."""
        self.failed, self.finished, self.fatal = True, None, line

    def _match_patterns(self, line: LogLine) -> bool:
        """Add events for the patterns that a line matches, and for its error; return whether there are any."""
        text = line.text.strip(" │╭╮╰╯─") if "│" in line.text else line.text
        error = self._find_error(line)
        is_error = error is not None
        if is_error and self._frames and self._ends_traceback(line):
            line = replace(line, frame=self._frames[-1].lstrip("/"))
        if error and ":" not in text:
            text = f"{error} ({'/'.join(Path(self._frame).parts[-2:])})"
        lowered, level = text.lower(), level_of(text)
        has_error_level = "NCCL WARN" in text or "Assertion `" in text or bool(ERROR_LEVEL.search(text))
        is_strong = is_error or (not level and (has_error_level or self._continues_error(line)))
        self._record_error(line, error, level, has_error_level and not level)
        frames = "\n".join(self._frames) if is_error else ""
        is_informative = False
        for cause, pattern in _candidates(lowered):
            if not pattern.matches(text, lowered, frames):
                continue
            is_informative = True
            is_mention = bool(level) and not pattern.any_level and not is_error
            if not is_mention and (is_strong or pattern.any_level or cause.depth != PROGRAM):
                certainty = min(pattern.sure, HINT) if error and is_quoted(cause, pattern, error) else pattern.sure
                self._add(cause.name, certainty, pattern.alone, line, is_strong)
            else:  # after `Cannot import zarr ... ModuleNotFoundError`, for example, the run continues
                self._add(cause.name, MENTION, False, line, False)
        if error and not (is_informative and self._is_explained(line)):
            is_informative |= self._add_error(line, error, is_matched=is_informative)
        return is_informative

    def _find_error(self, line: LogLine) -> str | None:
        """Return the error in a line, None if there is none or Python ignores it.

        An AssertionError without a message is returned with its condition.
        """
        ends_traceback = self._ends_traceback(line)
        error = find_error(line, ends_traceback)
        if error and self._is_ignored:
            self._is_ignored = False
            return None
        if error and ":" not in error and ends_traceback and self._source.startswith("assert "):
            return f"{error}: {self._source}"
        return error

    def _record_error(self, line: LogLine, error: str | None, level: Level | None, has_error_level: bool) -> None:
        """Record a line that contains `error` (None = no error), has level ERROR, or reports the end of a step."""
        name = (error or "").partition(":")[0]
        if error is not None:
            self._record_new_error(line, name)
        if line.number != self._report and ((error and not name.endswith(_NO_ERRORS)) or has_error_level):
            self._error_line = line
        if (error and not name.endswith(_EXITS) and not level) or _ENDED_STEP.search(line.text):
            self.fatal = line

    def _record_new_error(self, line: LogLine, name: str) -> None:
        """Record the line of a new error, which ended the program instead of the errors that were being handled."""
        if line.rank in self._errors:  # not part of a chain of tracebacks
            self._handled.pop(line.rank, None)
        self._errors[line.rank] = line
        handled = [e for e in self._handled.get(line.rank, []) if _class_name(find_error(e, True)) != _class_name(name)]
        numbers = {handled_line.number for handled_line in handled}
        if numbers:
            self.events = [replace(e, ended_by=line) if e.line.number in numbers else e for e in self.events]

    def _ends_traceback(self, line: LogLine) -> bool:
        """Return whether a line follows the last frame of a traceback, its source line and its markers."""
        return 0 <= line.number - self._skip <= 2

    def _continues_error(self, line: LogLine) -> bool:
        """Return whether a line may belong to the message of an error above it."""
        newest_error = self._errors.get(line.rank)
        return (
            newest_error is not None
            and line.number - newest_error.number <= _MAX_MESSAGE_LINES
            and not time_of(line.text)
        )

    def _is_explained(self, line: LogLine) -> bool:
        """Return whether a line matches a pattern that is more certain than HINT."""
        return any(e.line.number == line.number and e.sure > HINT for e in self.events[-8:])

    def _add_error(self, line: LogLine, error: str, is_matched: bool) -> bool:
        """Add events for an error: PROGRAM_ERROR and, unless a pattern matches, the cause that its topic suggests.

        Return False if it is not an error, such as SystemExit. An error of a launcher is recorded as its report.
        """
        name = _class_name(error)
        if name in _LAUNCHER_ERRORS or _LAUNCHER_MESSAGE.search(error):
            self._record_failure(line)
            return True
        if name.endswith(_NO_ERRORS):
            return False
        if not is_matched and not GENERIC_ERROR.search(error):
            message = "" if _KEY.search(error) else _QUOTED.sub("", error)
            cause = find_by_topic(CAUSES_WITH_TOPICS, message, self._frames)
            if cause:
                self._add(cause.name, HINT, True, line, True)
        self._add(PROGRAM_ERROR, LIKELY, True, line, True, error)
        return True

    def _add(self, cause: str, sure: int, is_alone: bool, line: LogLine, is_error: bool, error: str = "") -> None:
        if cause in _SIGNAL_CAUSES and sure > MENTION:
            self.fatal = line
        rank = line.rank
        if rank is None and self._block_rank is not None and _EXIT.match(line.text):
            rank = self._block_rank
        key = (cause, rank)
        self._counts[key] = self._counts.get(key, 0) + 1
        event = Event(cause, sure, is_alone, line, is_error, self.lines, rank, error)
        if self._counts[key] > MAX_EVENTS:
            index = max(i for i, e in enumerate(self.events) if (e.cause, e.rank) == key)
            del self.events[index]
        self.events.append(event)

    def is_recovered(self, event: Event) -> bool:
        """Return whether training continued after an event, or had already ended before it."""
        if self.series.steps_after(event.line.number) >= GOOD_STEPS:
            return True
        if self.finished is None:
            return False
        if event.line.number <= self.finished.number:
            return True
        if event.cause == "nccl_timeout":  # ranks that hang after the last step fail the job half an hour later
            return False
        return not event.is_error or event.sure <= HINT or event.is_secondary


def read(path: Path, tail: int = 0) -> LogEvents:
    """Return the events in a log; if `tail` is not 0, only in its last `tail` bytes.

    Raises:
        OSError: the log cannot be read.
    """
    events = LogEvents(path)
    events.damaged_after = scan(path, events.process, tail)
    events.finish()
    return events


def _class_name(error: str | None) -> str:
    """Return the class name of an error without its module."""
    return (error or "").partition(":")[0].rpartition(".")[2]


def _module(file: str) -> str:
    """Return the path of a file in its installed package; for other files, the file name with its folder."""
    _, is_package, inside = file.rpartition("-packages/")
    return f"/{inside if is_package else '/'.join(file.split('/')[-2:])}"


def _candidates(lowered: str) -> list[tuple[Cause, Pattern]]:
    """Return the patterns whose phrases may occur in a lowercase line: their first three letters occur in it."""
    if not _PATTERNS_BY_START:
        for cause in ALL:
            for pattern in cause.patterns:
                _PATTERNS_BY_START.setdefault(pattern.phrase[:3], []).append((cause, pattern))
    return [pair for start, pairs in _PATTERNS_BY_START.items() if start in lowered for pair in pairs]
