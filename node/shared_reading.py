"""Read a large checkpoint on all nodes of a job at once, to see whether it is as it was written. Standard library only.

One node reads a few GiB/s, and a checkpoint of 405B parameters has 5.6 TB: alone, the first node would read it for half
an hour. As a step of the job every node reads its share of the files: `python3 shared_reading.py CHECKPOINT`, whose
tasks print a JSON line each.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":  # as a file of the run folder: what it imports lies beside it
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from superpod.node import checkpoint_files

SHARE_FROM = 64 << 30
"""Bytes from which a step of the job, which takes a second or two to start, is faster than one node alone."""


class SharedReader:
    """Reads checkpoints on the nodes of this job; `steps` counts the steps that it has started for that."""

    def __init__(self, nodes: list[str], share_from: int = SHARE_FROM) -> None:
        self._nodes, self._share_from, self.steps = nodes, share_from, 0

    def __call__(self, checkpoint: Path) -> list[str]:
        """What is wrong in the files of a checkpoint (`checkpoint_files.damages`)."""
        if len(self._nodes) < 2 or bytes_of(checkpoint) < self._share_from:
            return checkpoint_files.damages(checkpoint)
        answers = self._answers(checkpoint)
        # A node that does not answer has not read its share, so that the first one must.
        missing = [share for share in range(len(self._nodes)) if share not in answers]
        for share in missing:
            answers[share] = checkpoint_files.damages(checkpoint, share, len(self._nodes))
        return [problem for share in sorted(answers) for problem in answers[share]]

    def _answers(self, checkpoint: Path) -> dict[int, list[str]]:
        """What every node found in its share, by the number of the share."""
        self.steps += 1
        words = ["srun", "--overlap", f"--ntasks={len(self._nodes)}", "--ntasks-per-node=1", "--cpu-bind=none"]
        words += ["--label", "--kill-on-bad-exit=0", sys.executable, os.path.abspath(__file__), str(checkpoint)]
        try:
            output = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout
        except OSError:
            return {}
        # srun's --label puts the task's number before each line.
        lines = [match for line in output.splitlines() if (match := re.fullmatch(r"\s*(\d+): (\[.*\])", line))]
        return {int(match[1]): json.loads(match[2]) for match in lines if int(match[1]) < len(self._nodes)}


def bytes_of(checkpoint: Path) -> int:
    """Size of all files of a checkpoint."""
    files = (Path(folder) / name for folder, _, names in os.walk(checkpoint) for name in names)
    return sum(checkpoint_files.size(file) or 0 for file in files)


if __name__ == "__main__":
    task, tasks = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    print(json.dumps(checkpoint_files.damages(Path(sys.argv[1]), task, tasks)), flush=True)
