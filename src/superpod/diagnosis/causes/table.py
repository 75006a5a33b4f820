"""What a record of the table of causes holds. Standard library only, Python 3.9.

A cause is recognised by signs: words that a library prints, as its source or its users' reports have them. Which of
several causes is the root is decided by depth, by `follows` and by order (see `superpod/diagnosis/verdict.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

ECHO, ENDING, PROGRAM, GROUND = range(4)
"""How deep a cause lies: it only follows from others; it ends a run from outside or after waiting; the program or what
it was given is wrong; the machine, a disk or a network failed. A shallow cause follows from a deeper one."""

HINT, LIKELY, CERTAIN = 1, 2, 3
"""How sure a sign is of its cause: it points there when nothing else does; it usually means it; it rules out others."""

CONFIDENCE = {HINT: "possible", LIKELY: "likely", CERTAIN: "certain"}


@dataclass(frozen=True)
class Sign:
    """Words of one cause: `words` in lower case must be in a line, and `pattern` match it, where there is one.

    `alone` is False for words that healthy runs print too: they count only where something else shows that the run
    failed. `any_level` takes lines that call themselves a warning or information, too. `frame` must match a frame of
    the traceback that the line ends: the same message of the operating system means other things in other calls.
    """

    words: str
    pattern: str = ""
    sure: int = CERTAIN
    alone: bool = True
    any_level: bool = False
    frame: str = ""

    def matches(self, text: str, lowered: str, frames: str = "") -> bool:
        """Whether a line has the sign; `lowered` is the line in lower case, `frames` its traceback's, a line each."""
        if self.words not in lowered:
            return False
        if self.frame and not _compiled(self.frame).search(frames):
            return False
        return not self.pattern or bool(_compiled(self.pattern).search(text))


@dataclass(frozen=True)
class Cause:
    """One record: what it means in a sentence, the next command or move, its signs, and what it may follow from."""

    name: str
    depth: int
    means: str
    fix: str
    signs: tuple[Sign, ...]
    follows: tuple[str, ...] = ()
    """causes of the same or a lesser depth that explain this one"""
    about: str = ""
    """what an error without a sign speaks of, or the frames of its traceback, where this is possible"""
    speaks: str = ""
    """what more an error's own message speaks of, where this is possible"""
    otherwise: str = ""
    """how an error reads for which this is possible where its message speaks of nothing that is known"""


def topic(causes: Sequence[Cause], error: str, frames: Sequence[str]) -> Cause | None:
    """The cause that an error points to by what it speaks of first, by how it reads, or by its innermost frame."""
    cause = _spoken_of(causes, error, in_message=True)
    cause = cause or next((c for c in causes if c.otherwise and _compiled(c.otherwise).search(error)), None)
    return cause or next((found for frame in reversed(frames) if (found := _spoken_of(causes, frame))), None)


def _spoken_of(causes: Sequence[Cause], text: str, in_message: bool = False) -> Cause | None:
    """The cause whose words are the first in a text: an error's message, or a frame of its traceback."""
    found = [
        (match.start(), cause)
        for cause in causes
        for words in ((cause.about, cause.speaks) if in_message else (cause.about,))
        if words and (match := _compiled(words).search(text))
    ]
    return min(found, key=lambda place: place[0])[1] if found else None


_PATTERNS: dict[str, re.Pattern[str]] = {}


def _compiled(pattern: str) -> re.Pattern[str]:
    if pattern not in _PATTERNS:
        _PATTERNS[pattern] = re.compile(pattern, re.IGNORECASE)
    return _PATTERNS[pattern]
