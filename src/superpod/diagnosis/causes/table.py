"""The classes of the cause tables. Standard library only, Python 3.9.

Patterns in log lines detect a cause. Of several causes, `superpod/diagnosis/verdict.py` selects the root cause, based
on their depth, `follows`, and the order of the log lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

ECHO, ENDING, PROGRAM, GROUND = range(4)
"""Depth of a cause: a cause may follow from a deeper one. ECHO is always a consequence of other causes. ENDING ends a
run from outside or with a timeout. PROGRAM is an error in the program or its input. GROUND is a failure of a machine,
disk or network."""

HINT, LIKELY, CERTAIN = 1, 2, 3
"""Certainty of a pattern: HINT counts only if no better pattern matches, LIKELY is usually right, CERTAIN always."""

CALLERS = 2
"""Number of innermost frames of a traceback that are searched for topics; outer frames only call them."""

CONFIDENCE = {HINT: "possible", LIKELY: "likely", CERTAIN: "certain"}
"""Certainty -> word for users."""


@dataclass(frozen=True)
class Pattern:
    """A pattern of log lines that indicate a cause.

    Attributes:
        phrase: a lowercase phrase that the line must contain.
        pattern: a regular expression that the line must also match; '' = none.
        sure: the certainty: HINT, LIKELY or CERTAIN.
        alone: False for phrases that healthy runs print too; they count only if there is other evidence of a failure.
        any_level: whether lines of level WARNING or INFO also count.
        frame: a regular expression that a frame of the preceding traceback must match; '' = none. It distinguishes
            calls that fail with the same error message from the operating system.
    """

    phrase: str
    pattern: str = ""
    sure: int = CERTAIN
    alone: bool = True
    any_level: bool = False
    frame: str = ""

    def matches(self, text: str, lowered: str, frames: str = "") -> bool:
        """Return whether a line matches; `lowered` is the line in lowercase, `frames` the frames of its traceback."""
        if self.phrase not in lowered:
            return False
        if self.frame and not _compile(self.frame).search(frames):
            return False
        return not self.pattern or bool(_compile(self.pattern).search(text))


def phrases(
    *texts: str, pattern: str = "", sure: int = CERTAIN, alone: bool = True, any_level: bool = False
) -> tuple[Pattern, ...]:
    """Return a `Pattern` for each of the lowercase phrases `texts`, with the same further arguments."""
    return tuple(Pattern(text, pattern, sure, alone, any_level) for text in texts)


@dataclass(frozen=True)
class Cause:
    """A cause of failures, with the patterns that detect it.

    `means` explains the cause to users, `fix` is the next step.
    """

    name: str
    depth: int
    means: str
    fix: str
    patterns: tuple[Pattern, ...]
    follows: tuple[str, ...] = ()
    """names of causes of the same or a lesser depth from which this one may follow"""
    topics: str = ""
    """regular expression of topics; searched in the message and traceback of an error that no pattern matches"""
    message_topics: str = ""
    """regular expression of topics; searched only in the message"""
    fallback: str = ""
    """regular expression of errors without a known topic that this cause may explain"""


def find_by_topic(causes: Sequence[Cause], error: str, frames: Sequence[str]) -> Cause | None:
    """Return the cause that the topic of an error suggests; None if it has no known topic.

    The message `error` is searched first, then the innermost frames of the traceback `frames`.
    """
    cause = _first_mentioned(causes, error, in_message=True)
    if cause is not None:
        return cause

    for cause in causes:
        if cause.fallback and _compile(cause.fallback).search(error):
            return cause

    for frame in reversed(frames[-CALLERS:]):
        cause = _first_mentioned(causes, frame)
        if cause is not None:
            return cause
    return None


def _first_mentioned(causes: Sequence[Cause], text: str, in_message: bool = False) -> Cause | None:
    """Return the cause whose topic occurs first in a message or in a frame; None if no topic occurs."""
    first, first_at = None, len(text) + 1
    for cause in causes:
        patterns = (cause.topics, cause.message_topics) if in_message else (cause.topics,)
        for pattern in patterns:
            match = _compile(pattern).search(text) if pattern else None
            if match and match.start() < first_at:
                first, first_at = cause, match.start()
    return first


_PATTERNS: dict[str, re.Pattern[str]] = {}


def _compile(pattern: str) -> re.Pattern[str]:
    if pattern not in _PATTERNS:
        _PATTERNS[pattern] = re.compile(pattern, re.IGNORECASE)
    return _PATTERNS[pattern]
