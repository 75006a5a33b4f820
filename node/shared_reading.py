"""Read a large checkpoint on all nodes of a job at once, to see whether it is as it was written. Standard library only.

One node reads a few GiB/s, and a checkpoint of 405B parameters has 5.6 TB: alone, the first node would read it for half
an hour. As a step of the job every node reads its share of the files: `python3 shared_reading.py CHECKPOINT SHARES`,
whose tasks print a JSON line each.

The first node alone reads the manifest, which has as many parts as there were nodes, and torch's table of places, and
writes into one file, SHARES, what each node is to read: with 2,048 nodes a file system's metadata server sees that file
opened 2,048 times, and not each of 2,048 parts by each of 2,048 nodes.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":  # as a file of the run folder: what it imports lies beside it
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from superpod.errors import UserError
from superpod.node import checkpoint_files, job_code, job_step
from superpod.node.checkpoint_files import Content
from superpod.node.units import duration

SHARE_FROM = 64 << 30
"""Bytes from which a step of the job, which takes a second or two to start, is faster than one node alone."""


LEAST_RATE = 0.2e9
"""Bytes a second that a node reads at least, of which a healthy one reads ten times as many."""

START_S = 60.0
"""What a step may take to start."""

ALONE_S = 900.0
"""No longer does the first node read, at LEAST_RATE, what others have not read in time, while all hold their GPUs."""


SHARES = "shares"
"""Name of the file that tells the nodes what to read, as long as they read."""

_PLACE = "{:15d} {:15d}\n"
"""A line at the head of SHARES for each share: where it begins, and how long it is."""


class SharedReader:
    """Reads checkpoints on the nodes of this job; `steps` counts the steps that it has started for that.

    `folder` is one that all nodes see, and that this node may write. `left_s` gives the seconds until the end of the
    job, of which half at most go into waiting for the nodes.
    """

    def __init__(
        self,
        nodes: list[str],
        folder: Path,
        share_from: int = SHARE_FROM,
        *,
        left_s: Callable[[], float] = lambda: float("inf"),
        log: Callable[[str], None] = lambda words: None,
        start_s: float = START_S,
    ) -> None:
        self._nodes, self._folder, self._share_from, self.steps = nodes, folder, share_from, 0
        self._left_s, self._log, self._start_s = left_s, log, start_s

    def __call__(self, checkpoint: Path) -> list[str]:
        """What is wrong in the files of a checkpoint (`checkpoint_files.damages`).

        Raises:
            UserError: nodes have not read their share in time, and for the first one alone it is too much.
        """
        if len(self._nodes) < 2 or (size := checkpoint_files.bytes_of(checkpoint)) < self._share_from:
            return checkpoint_files.damages(checkpoint)
        share_s = size / len(self._nodes) / LEAST_RATE
        limit_s = min(share_s + self._start_s, max(self._left_s() / 2, 1.0))
        contents = checkpoint_files.contents_of(checkpoint)
        shares = [contents[share :: len(self._nodes)] for share in range(len(self._nodes))]
        answers, is_late = self._answers(checkpoint, shares, limit_s)
        # A node that does not answer has not read its share, so that the first one must.
        missing = [share for share in range(len(self._nodes)) if share not in answers]
        if is_late:
            names = ", ".join(self._nodes[share] for share in missing[:8]) + ", ..." * (len(missing) > 8)
            words = f"{names} did not read their share of {checkpoint.name} in {duration(limit_s)}"
            if len(missing) * share_s > min(ALONE_S, self._left_s() / 2):
                raise UserError(words, "look at the file systems of these nodes, or leave them out (--exclude)")
            self._log(f"{words}: the first node reads it")
        for share in missing:
            answers[share] = checkpoint_files.damages_in(checkpoint, shares[share])
        return [problem for share in sorted(answers) for problem in answers[share]]

    def _answers(
        self, checkpoint: Path, shares: list[list[Content]], limit_s: float
    ) -> tuple[dict[int, list[str]], bool]:
        """What every node found in its share, by the number of the share; and whether some were not done in time."""
        command = [sys.executable, job_code.for_nodes("node/shared_reading.py"), str(checkpoint)]
        file = self._folder / SHARES
        try:
            write_shares(file, shares)
            lines, code = job_step.on_every_node(len(self._nodes), [*command, str(file)], limit_s)
        except OSError:
            return {}, False
        finally:
            file.unlink(missing_ok=True)
        answers = {node: json.loads(line) for node, line in lines.items() if re.fullmatch(r"\[.*\]", line)}
        self.steps += bool(answers) or code in (0, None)  # an srun that fails at once has made no step
        return answers, code is None


def write_shares(file: Path, shares: list[list[Content]]) -> None:
    """Write what each node is to read. Raises OSError."""
    blocks = [json.dumps(share).encode() for share in shares]
    at = len(_PLACE.format(0, 0)) * len(blocks)
    places = b""
    for block in blocks:
        places += _PLACE.format(at, len(block)).encode()
        at += len(block)
    file.write_bytes(places + b"".join(blocks))


def read_share(file: Path, share: int) -> list[Content]:
    """One node's share: two reads of one file. Raises OSError and ValueError."""
    width = len(_PLACE.format(0, 0))
    with open(file, "rb", buffering=0) as stream:
        at, length = map(int, os.pread(stream.fileno(), width, share * width).split())
        return [Content(*row) for row in json.loads(os.pread(stream.fileno(), length, at))]


if __name__ == "__main__":
    own = read_share(Path(sys.argv[2]), int(os.environ["SLURM_PROCID"]))
    print(json.dumps(checkpoint_files.damages_in(Path(sys.argv[1]), own)), flush=True)
