"""Read a large checkpoint on all nodes of a job at once, to see whether it is as it was written. Standard library only.

One node reads a few GiB/s, and a checkpoint of 405B parameters has 5.6 TB: alone, the first node would read it for half
an hour. As a step of the job every node reads its share of the files: `python3 shared_reading.py CHECKPOINT`, whose
tasks print a JSON line each.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":  # as a file of the run folder: what it imports lies beside it
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from superpod.errors import UserError
from superpod.node import checkpoint_files
from superpod.node.progress import duration

SHARE_FROM = 64 << 30
"""Bytes from which a step of the job, which takes a second or two to start, is faster than one node alone."""


LEAST_RATE = 0.2e9
"""Bytes a second that a node reads at least, of which a healthy one reads ten times as many."""

START_S, END_S = 60.0, 10.0
"""What a step may take to start; and to end, once it is told to."""

ALONE_S = 900.0
"""No longer does the first node read, at LEAST_RATE, what others have not read in time, while all hold their GPUs."""


class SharedReader:
    """Reads checkpoints on the nodes of this job; `steps` counts the steps that it has started for that.

    `left_s` gives the seconds until the end of the job, of which half at most go into waiting for the nodes.
    """

    def __init__(
        self,
        nodes: list[str],
        share_from: int = SHARE_FROM,
        *,
        left_s: Callable[[], float] = lambda: float("inf"),
        log: Callable[[str], None] = lambda words: None,
        start_s: float = START_S,
    ) -> None:
        self._nodes, self._share_from, self.steps = nodes, share_from, 0
        self._left_s, self._log, self._start_s = left_s, log, start_s

    def __call__(self, checkpoint: Path) -> list[str]:
        """What is wrong in the files of a checkpoint (`checkpoint_files.damages`).

        Raises:
            UserError: nodes have not read their share in time, and for the first one alone it is too much.
        """
        if len(self._nodes) < 2 or (size := bytes_of(checkpoint)) < self._share_from:
            return checkpoint_files.damages(checkpoint)
        share_s = size / len(self._nodes) / LEAST_RATE
        limit_s = min(share_s + self._start_s, max(self._left_s() / 2, 1.0))
        answers, is_late = self._answers(checkpoint, limit_s)
        # A node that does not answer has not read its share, so that the first one must.
        missing = [share for share in range(len(self._nodes)) if share not in answers]
        if is_late:
            names = ", ".join(self._nodes[share] for share in missing[:8]) + ", ..." * (len(missing) > 8)
            words = f"{names} did not read their share of {checkpoint.name} in {duration(limit_s)}"
            if len(missing) * share_s > min(ALONE_S, self._left_s() / 2):
                raise UserError(words, "look at the file systems of these nodes, or leave them out (--exclude)")
            self._log(f"{words}: the first node reads it")
        for share in missing:
            answers[share] = checkpoint_files.damages(checkpoint, share, len(self._nodes))
        return [problem for share in sorted(answers) for problem in answers[share]]

    def _answers(self, checkpoint: Path, limit_s: float) -> tuple[dict[int, list[str]], bool]:
        """What every node found in its share, by the number of the share; and whether some were not done in time."""
        words = ["srun", "--overlap", f"--ntasks={len(self._nodes)}", "--ntasks-per-node=1", "--cpu-bind=none"]
        words += ["--label", "--kill-on-bad-exit=0", sys.executable, os.path.abspath(__file__), str(checkpoint)]
        try:
            output, code = _run(words, limit_s)
        except OSError:
            return {}, False
        # srun's --label puts the task's number before each line.
        lines = [match for line in output.splitlines() if (match := re.fullmatch(r"\s*(\d+): (\[.*\])", line))]
        answers = {int(match[1]): json.loads(match[2]) for match in lines if int(match[1]) < len(self._nodes)}
        self.steps += bool(answers) or code in (0, None)  # an srun that fails at once has made no step
        return answers, code is None


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


def bytes_of(checkpoint: Path) -> int:
    """Size of all files of a checkpoint."""
    files = (Path(folder) / name for folder, _, names in os.walk(checkpoint) for name in names)
    return sum(checkpoint_files.size(file) or 0 for file in files)


if __name__ == "__main__":
    task, tasks = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    print(json.dumps(checkpoint_files.damages(Path(sys.argv[1]), task, tasks)), flush=True)
