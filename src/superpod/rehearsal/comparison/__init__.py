"""Compares the runs of a rehearsal with each other."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckResult:
    """The result of one comparison."""

    name: str
    passed: bool
    message: str
    """The numbers that were compared, or the fault that was found."""
