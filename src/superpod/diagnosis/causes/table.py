"""The records of the table of causes. Standard library only, Python 3.9.

A cause is recognized by signs: phrases that a library prints. `superpod/diagnosis/verdict.py` selects the root among
several causes by their depth, by `follows` and by the order of their lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

ECHO, ENDING, PROGRAM, GROUND = range(4)
"""Depth of a cause. ECHO only follows from other causes. ENDING ends a run from outside or by a timeout. PROGRAM is an
error of the program or its input. GROUND is a failure of a machine, disk or network. A shallow cause may follow from a
deeper one."""

HINT, LIKELY, CERTAIN = 1, 2, 3
"""Certainty of a sign: HINT counts without a better sign only, LIKELY is usually right, CERTAIN rules out others."""

CONFIDENCE = {HINT: "possible", LIKELY: "likely", CERTAIN: "certain"}


@dataclass(frozen=True)
class Sign:
    """A pattern in a log line that indicates a cause.

    Attributes:
        phrase: a phrase in lower case that the line must contain.
        pattern: a regular expression that the line must match too; '' = none.
        sure: HINT, LIKELY or CERTAIN.
        alone: False for phrases that healthy runs print too; they count only if something else shows a failure.
        any_level: whether lines of level WARNING or INFO count too.
        frame: a regular expression that a frame of the preceding traceback must match; '' = none. It distinguishes
            calls that fail with the same message of the operating system.
    """

    phrase: str
    pattern: str = ""
    sure: int = CERTAIN
    alone: bool = True
    any_level: bool = False
    frame: str = ""

    def matches(self, text: str, lowered: str, frames: str = "") -> bool:
        """Return whether a line, given also in lower case, and its traceback (one frame per line) have the sign."""
        if self.phrase not in lowered:
            return False
        if self.frame and not _compiled(self.frame).search(frames):
            return False
        return not self.pattern or bool(_compiled(self.pattern).search(text))


@dataclass(frozen=True)
class Cause:
    """A cause of failures: its explanation, the recommended fix, and the signs by which it is recognized."""

    name: str
    depth: int
    means: str
    fix: str
    signs: tuple[Sign, ...]
    follows: tuple[str, ...] = ()
    """names of causes of the same or a lesser depth from which this one may follow"""
    about: str = ""
    """topics: matched in the message of an error without a sign, or in the frames of its traceback"""
    speaks: str = ""
    """further topics, matched only in the message"""
    otherwise: str = ""
    """matches errors without any known topic for which this cause is possible"""


def find_by_topic(causes: Sequence[Cause], error: str, frames: Sequence[str]) -> Cause | None:
    """Return the possible cause of an error without a sign: by its message, or else by its innermost frame."""
    cause = _first_mentioned(causes, error, in_message=True)
    if cause is not None:
        return cause

    for cause in causes:
        if cause.otherwise and _compiled(cause.otherwise).search(error):
            return cause

    for frame in reversed(frames):
        cause = _first_mentioned(causes, frame)
        if cause is not None:
            return cause
    return None


def _first_mentioned(causes: Sequence[Cause], text: str, in_message: bool = False) -> Cause | None:
    """Return the cause whose topic comes first in a text: a message, or a frame of a traceback."""
    first, first_at = None, len(text) + 1
    for cause in causes:
        patterns = (cause.about, cause.speaks) if in_message else (cause.about,)
        for pattern in patterns:
            match = _compiled(pattern).search(text) if pattern else None
            if match and match.start() < first_at:
                first, first_at = cause, match.start()
    return first


_PATTERNS: dict[str, re.Pattern[str]] = {}


def _compiled(pattern: str) -> re.Pattern[str]:
    if pattern not in _PATTERNS:
        _PATTERNS[pattern] = re.compile(pattern, re.IGNORECASE)
    return _PATTERNS[pattern]
