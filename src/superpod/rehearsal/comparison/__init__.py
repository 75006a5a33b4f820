"""Compares the runs of a rehearsal with each other."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckResult:
    """The result of one comparison."""

    name: str
    passed: bool
    message: str
    """The values that were compared, or the error that was found."""
