"""Check the files of a large checkpoint on all nodes of a job in parallel. Standard library only.

A checkpoint of 16,384 ranks has 32,768 files, and one of a 405B model has 5.6 TB, which one node would read in half an
hour. Therefore each node checks a share of the files in a job step: `python3 shared_reading.py CHECKPOINT SHARES
BYTES`. Each task prints a line of JSON. BYTES is the maximum number of bytes to read from files without a checksum; -1
= every byte of every file.

Only the first node reads the manifest, which has one part per node, and `.metadata`. It writes the shares of all nodes
to one file, SHARES: with 2,048 nodes, this file is opened 2,048 times, instead of each of the manifest's 2,048 parts.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

if __name__ == "__main__":  # import from the run folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from superpod.common.units import duration
from superpod.runtime.attempts import job_code, job_step
from superpod.runtime.checkpoints import checkpoint_files
from superpod.runtime.checkpoints.checkpoint_files import Budget, Content, Findings, Problem

SHARE_FROM_FILES = 4096
"""Minimum number of files for which a job step is started, which takes a second or two."""

SHARE_FROM_BYTES = 64 << 30
"""Minimum number of bytes for which a job step is started if every byte is read."""

MIN_RATE = 0.2e9
"""Bytes per second that a slow node reads. A healthy node is ten times as fast."""

MIN_FILE_RATE = 20.0
"""Files per second that a slow node checks."""

START_S = 60.0
"""Seconds that a job step may take to start."""

SHARES = "shares"
"""Name of the temporary file with the share of each node."""

_HEADER_LINE = "{:15d} {:15d}\n"
"""A line in the header of SHARES for each share: its offset and length."""


class SharedReader:
    """Checks checkpoints on all nodes of this job; `steps` is the number of job steps that it has started.

    A slow file system does not fail an attempt: of files that were not read in time, the first node checks only sizes
    and samples.

    Args:
        nodes: the names of the job's nodes.
        folder: a folder that this node can write to and all nodes can read.
        share_from: the minimum number of files for a job step.
        fully: whether to read every byte.
        left_s: returns the seconds until the end of the job, of which at most half are spent on waiting for nodes.
        log: called with a message if nodes exceed the time limit.
        start_s: seconds that a job step may take to start.
    """

    def __init__(
        self,
        nodes: list[str],
        folder: Path,
        share_from: int = SHARE_FROM_FILES,
        *,
        fully: bool = False,
        left_s: Callable[[], float] = lambda: float("inf"),
        log: Callable[[str], None] = lambda message: None,
        start_s: float = START_S,
    ) -> None:
        self._nodes, self._folder, self._share_from, self._fully, self.steps = nodes, folder, share_from, fully, 0
        self._left_s, self._log, self._start_s = left_s, log, start_s

    def __call__(self, checkpoint: Path) -> Findings:
        """Check a checkpoint like `checkpoint_files.check_samples`. Raises OSError and ValueError."""
        listed_contents = checkpoint_files.contents_of(checkpoint)
        problems = self._check(checkpoint, listed_contents.contents)
        return Findings(problems, listed_contents.is_verified and not problems)

    def _check(self, checkpoint: Path, contents: list[Content]) -> list[Problem]:
        total_bytes = sum(content.size for content in contents)
        is_large = len(contents) >= self._share_from or (self._fully and total_bytes >= SHARE_FROM_BYTES)
        if len(self._nodes) < 2 or not is_large:
            return _check_here(checkpoint, contents, -1 if self._fully else checkpoint_files.READ_BYTES)

        count = len(self._nodes)
        share_s = total_bytes / count / MIN_RATE if self._fully else len(contents) / count / MIN_FILE_RATE
        limit_s = min(share_s + self._start_s, max(self._left_s() / 2, 1.0))
        shares = [contents[share::count] for share in range(count)]
        found, is_over_limit = self._check_on_nodes(checkpoint, shares, limit_s)

        # The first node checks the shares of nodes that did not respond.
        missing_shares = [share for share in range(count) if share not in found]
        if is_over_limit:
            names = ", ".join(self._nodes[share] for share in missing_shares[:8])
            if len(missing_shares) > 8:
                names += ", ..."
            self._log(
                f"{names} did not read their share of {checkpoint.name} within {duration(limit_s)}; the first node "
                "checks the sizes and samples of these files instead"
            )
        budget = Budget(0 if self._fully else checkpoint_files.READ_BYTES / count)
        unread_contents = [content for share in missing_shares for content in shares[share]]
        problems = [problem for share in sorted(found) for problem in found[share]]
        return problems + checkpoint_files.check_contents(checkpoint, unread_contents, budget)

    def _check_on_nodes(
        self, checkpoint: Path, shares: list[list[Content]], limit_s: float
    ) -> tuple[dict[int, list[Problem]], bool]:
        """Check each share on its node; return the problems by share, and whether a node exceeded `limit_s` seconds."""
        max_bytes = -1 if self._fully else checkpoint_files.READ_BYTES // len(shares)
        file = self._folder / SHARES
        code_file = job_code.path_for_nodes("runtime/checkpoints/shared_reading.py")
        command = [sys.executable, code_file, str(checkpoint), str(file), str(max_bytes)]
        try:
            write_shares(file, shares)
            lines, code = job_step.run_on_every_node(len(self._nodes), command, limit_s)
        except OSError:
            return {}, False
        finally:
            file.unlink(missing_ok=True)
        found = {
            node: [Problem(*row) for row in json.loads(printed[-1])]
            for node, printed in lines.items()
            if re.fullmatch(r"\[.*\]", printed[-1])
        }
        if found or code in (0, None):  # an srun that fails immediately has not created a step
            self.steps += 1
        return found, code is None


def _check_here(checkpoint: Path, contents: Sequence[Content], max_bytes: int) -> list[Problem]:
    """Check files on this node; read at most `max_bytes` of files without a checksum, -1 = every byte of all files."""
    return checkpoint_files.check_contents(checkpoint, contents, Budget(max_bytes) if max_bytes >= 0 else None)


def write_shares(file: Path, shares: list[list[Content]]) -> None:
    """Write the file SHARES: a header, then for each node a JSON block with its files. Raises OSError."""
    blocks = [json.dumps(share).encode() for share in shares]
    at = len(_HEADER_LINE.format(0, 0)) * len(blocks)
    header = b""
    for block in blocks:
        header += _HEADER_LINE.format(at, len(block)).encode()
        at += len(block)
    file.write_bytes(header + b"".join(blocks))


def read_share(file: Path, share: int) -> list[Content]:
    """Read the files that node number `share` checks from the file SHARES. Raises OSError and ValueError."""
    width = len(_HEADER_LINE.format(0, 0))
    with open(file, "rb", buffering=0) as stream:
        at, length = map(int, os.pread(stream.fileno(), width, share * width).split())
        return [Content(*row) for row in json.loads(os.pread(stream.fileno(), length, at))]


if __name__ == "__main__":
    own = read_share(Path(sys.argv[2]), int(os.environ["SLURM_PROCID"]))
    print(json.dumps(_check_here(Path(sys.argv[1]), own, int(sys.argv[3]))), flush=True)
