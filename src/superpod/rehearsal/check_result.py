"""One line of a rehearsal's verdict."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckResult:
    """What was compared, whether it is right, and the figures or the fault in words."""

    name: str
    passed: bool
    message: str
