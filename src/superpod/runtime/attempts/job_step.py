"""A step of this job with one task on every node, and what each node prints. Standard library only."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile

END_S = 10.0
"""What a step may take to end, once it is told to, seconds."""


def on_every_node(nodes: int, command: list[str], limit_s: float) -> tuple[dict[int, str], int | None]:
    """Run `command` once on each of the job's nodes.

    Returns the last line that each node printed, by the number of its task, which is the node's place in the job; and
    srun's exit code, None where `limit_s` seconds were not enough. Raises OSError where there is no srun.
    """
    words = ["srun", "--overlap", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpu-bind=none"]
    output, code = _run([*words, "--label", "--kill-on-bad-exit=0", *command], limit_s)
    # srun's --label puts the task's number before each line.
    lines = [match for line in output.splitlines() if (match := re.fullmatch(r"\s*(\d+): (.*)", line))]
    return {int(match[1]): match[2] for match in lines if int(match[1]) < nodes}, code


def _run(words: list[str], limit_s: float) -> tuple[str, int | None]:
    """What a command has written, until its time was over; and its exit code, None where it was. Raises OSError."""
    # A file, and no pipe, which would stay open as long as any process that the command has left.
    with tempfile.TemporaryFile("w+") as output:
        srun = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL)
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = srun.wait(limit_s)
        finally:  # a signal may end the waiting, too
            if srun.poll() is None:
                srun.terminate()
                try:
                    srun.wait(END_S)
                except subprocess.TimeoutExpired:
                    srun.kill()
                    srun.wait()
        output.seek(0)
        return output.read(), code
