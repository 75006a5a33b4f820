"""One line of a rehearsal's verdict."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """What was looked at, whether it is right, and what was seen."""

    name: str
    passed: bool
    said: str
