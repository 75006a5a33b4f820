"""Run a job step with one task per node, and collect its output. Standard library only."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile

END_S = 10.0
"""Seconds that srun may take to exit after a SIGTERM."""


def run_on_every_node(nodes: int, command: list[str], limit_s: float) -> tuple[dict[int, list[str]], int | None]:
    """Run `command` once on each of the job's `nodes` nodes.

    Returns the lines that each node printed, by the index of the node in the job, and the exit code of srun, None if it
    ran longer than `limit_s` seconds and was terminated. Raises OSError if srun is not installed.
    """
    srun = ["srun", "--overlap", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpu-bind=none"]
    output, code = _run([*srun, "--label", "--kill-on-bad-exit=0", *command], limit_s)

    lines: dict[int, list[str]] = {}
    for line in output.splitlines():
        match = re.fullmatch(r"\s*(\d+): (.*)", line)  # --label prefixes each line with the number of the task
        if match and int(match[1]) < nodes:
            lines.setdefault(int(match[1]), []).append(match[2])
    return lines, code


def _run(command: list[str], limit_s: float) -> tuple[str, int | None]:
    """Run a command; return its output and its exit code, None if it ran longer than `limit_s`. Raises OSError."""
    # A file, not a pipe, which would stay open as long as any descendant of the command runs.
    with tempfile.TemporaryFile("w+") as output:
        srun = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL)
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = srun.wait(limit_s)
        finally:  # also if a signal interrupts wait()
            if srun.poll() is None:
                srun.terminate()
                try:
                    srun.wait(END_S)
                except subprocess.TimeoutExpired:
                    srun.kill()
                    srun.wait()
        output.seek(0)
        return output.read(), code
