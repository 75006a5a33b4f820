"""Checks the files of a large checkpoint on all nodes of a job in parallel. Standard library only.

A checkpoint of 16,384 ranks has 32,768 files, and one of 405B parameters has 5.6 TB: the first node alone would read
for half an hour. So every node checks a share of the files in a step of the job:
`python3 shared_reading.py CHECKPOINT SHARES BYTES`. Each task prints a JSON line. BYTES is what it may read of files
without a checksum; -1 = every byte of every file.

Only the first node reads the manifest, which has one part per node, and `.metadata`. It writes what each node is to
check into one file, SHARES: with 2,048 nodes, the file system's metadata server sees 2,048 opens of one file, not
2,048 opens of each of 2,048 parts.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

if __name__ == "__main__":  # run from the run folder, which holds what it imports
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from superpod.common.units import duration
from superpod.runtime.attempts import job_code, job_step
from superpod.runtime.checkpoints import checkpoint_files
from superpod.runtime.checkpoints.checkpoint_files import Budget, Content, Findings, Problem

SHARE_FROM_FILES = 4096
"""Number of files above which a job step, which takes a second or two to start, is faster than one node."""

SHARE_FROM_BYTES = 64 << 30
"""The same in bytes, if every byte is read."""

LEAST_RATE = 0.2e9
"""Bytes per second that a slow node reads; a healthy one reads ten times as fast."""

LEAST_FILE_RATE = 20.0
"""Files per second that a slow node checks."""

START_S = 60.0
"""How long a job step may take to start."""


SHARES = "shares"
"""Temporary file that lists what each node is to check."""

_PLACE = "{:15d} {:15d}\n"
"""A line at the head of SHARES for each share: where it begins, and how long it is."""


class SharedReader:
    """Checks checkpoints on the nodes of this job; `steps` counts the job steps that it has started for that.

    All nodes see `folder`, and this node may write to it. `fully`: read every byte. `left_s` returns the seconds until
    the end of the job, of which at most half are spent waiting for nodes. A slow file system fails no attempt: what was
    not read in time is checked by the first node without `fully`.
    """

    def __init__(
        self,
        nodes: list[str],
        folder: Path,
        share_from: int = SHARE_FROM_FILES,
        *,
        fully: bool = False,
        left_s: Callable[[], float] = lambda: float("inf"),
        log: Callable[[str], None] = lambda words: None,
        start_s: float = START_S,
    ) -> None:
        self._nodes, self._folder, self._share_from, self._fully, self.steps = nodes, folder, share_from, fully, 0
        self._left_s, self._log, self._start_s = left_s, log, start_s

    def __call__(self, checkpoint: Path) -> Findings:
        """As `checkpoint_files.check_samples`. Raises OSError and ValueError."""
        listed = checkpoint_files.contents_of(checkpoint)
        bytes_ = sum(content.size for content in listed.contents)
        found = self._look(checkpoint, listed.contents, bytes_)
        return Findings(found, listed.is_verified and not found)

    def _look(self, checkpoint: Path, contents: list[Content], bytes_: int) -> list[Problem]:
        is_large = len(contents) >= self._share_from or (self._fully and bytes_ >= SHARE_FROM_BYTES)
        if len(self._nodes) < 2 or not is_large:
            return _look_here(checkpoint, contents, -1 if self._fully else checkpoint_files.READ_BYTES)
        count = len(self._nodes)
        share_s = bytes_ / count / LEAST_RATE if self._fully else len(contents) / count / LEAST_FILE_RATE
        limit_s = min(share_s + self._start_s, max(self._left_s() / 2, 1.0))
        shares = [contents[share::count] for share in range(count)]
        answers, is_late = self._answers(checkpoint, shares, limit_s)
        missing = [share for share in range(count) if share not in answers]
        if is_late:
            names = ", ".join(self._nodes[share] for share in missing[:8]) + ", ..." * (len(missing) > 8)
            self._log(
                f"{names} did not read their share of {checkpoint.name} in {duration(limit_s)}: the first node checks "
                "sizes and samples of it"
            )
        left = Budget(0 if self._fully else checkpoint_files.READ_BYTES / count)
        rest = [content for share in missing for content in shares[share]]
        found = [problem for share in sorted(answers) for problem in answers[share]]
        return found + checkpoint_files.check_contents(checkpoint, rest, left)

    def _answers(
        self, checkpoint: Path, shares: list[list[Content]], limit_s: float
    ) -> tuple[dict[int, list[Problem]], bool]:
        """What every node found in its share, by the number of the share; and whether some were not done in time."""
        bytes_ = -1 if self._fully else checkpoint_files.READ_BYTES // len(shares)
        file = self._folder / SHARES
        code_file = job_code.for_nodes("runtime/checkpoints/shared_reading.py")
        command = [sys.executable, code_file, str(checkpoint), str(file), str(bytes_)]
        try:
            write_shares(file, shares)
            lines, code = job_step.on_every_node(len(self._nodes), command, limit_s)
        except OSError:
            return {}, False
        finally:
            file.unlink(missing_ok=True)
        answers = {
            node: [Problem(*row) for row in json.loads(line)]
            for node, line in lines.items()
            if re.fullmatch(r"\[.*\]", line)
        }
        self.steps += bool(answers) or code in (0, None)  # an srun that fails at once has made no step
        return answers, code is None


def _look_here(checkpoint: Path, contents: Sequence[Content], bytes_: int) -> list[Problem]:
    """What is wrong with these files; reads up to `bytes_` of those without a checksum, -1 = every byte of all."""
    return checkpoint_files.check_contents(checkpoint, contents, Budget(bytes_) if bytes_ >= 0 else None)


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
    print(json.dumps(_look_here(Path(sys.argv[1]), own, int(sys.argv[3]))), flush=True)
