"""Run a command and return its output. Standard library only."""

from __future__ import annotations

import subprocess


def output_of(command: list[str], timeout_s: float = 5) -> str | None:
    """Return the stripped standard output of a command; None if it cannot be run, fails, or exceeds `timeout_s`."""
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip()
