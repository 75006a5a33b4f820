"""The logs of all attempts and ranks as one stream that can be followed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from superpod.node.run_folder import Attempt, RunFolder


class Reader:
    """Reads the logs of a run in the order of attempts and ranks, and later only what is new."""

    def __init__(
        self, run: RunFolder, *, rank: int | None = None, all_ranks: bool = False, attempt: str = "", tail: int = 0
    ) -> None:
        self._run, self._rank, self._all, self._attempt, self._tail = run, rank, all_ranks, attempt, tail
        self._at: dict[Path, int] = {}
        self._closed: set[str] = set()
        """attempts that had ended before they were read last: nothing can come any more"""
        self.files = 0
        """how many files the last call of `new` looked at"""

    def new(self) -> Iterator[str]:
        """Every line that was not returned before, with its attempt, node and rank.

        What a job printed that opened no attempt comes last: why its batch script ended, or why it had nothing to do.
        """
        attempts, self.files = self._run.attempts, 0
        for attempt in attempts:
            if attempt.name in self._closed or (self._attempt and attempt.name != self._attempt.zfill(3)):
                continue
            ended = "ended" in attempt.result
            for path in self._files(attempt):
                self.files += 1
                for line in self._lines(path):
                    yield f"[{attempt.name} {_who(path)}] {line}"
            if ended:
                self._closed.add(attempt.name)
        if self._rank is None and not self._attempt:
            for path in self._without_attempt(attempts):
                for line in self._lines(path):
                    yield f"[{path.stem}] {line}"

    def _files(self, attempt: Attempt) -> list[Path]:
        ranks = attempt.logs
        if self._all:
            return ranks
        rank = self._rank if self._rank is not None else 0
        chosen = [path for path in ranks if _rank(path) == rank]
        if self._rank is None and attempt.result.get("state") in ("failed", "stalled"):
            chosen += [path for path in ranks if _rank(path) is None]  # srun.log: why it ended them
        return chosen

    def _without_attempt(self, attempts: list[Attempt]) -> list[Path]:
        """The output of jobs of the run that opened no attempt: `slurm-JOB.out`."""
        opened = {str(attempt.result.get("job", "")) for attempt in attempts}
        outputs = sorted(self._run.path.glob("slurm-*.out"))
        return [path for path in outputs if path.stem.removeprefix("slurm-") not in opened]

    def _lines(self, path: Path) -> list[str]:
        """Whole lines from where reading stopped; an unfinished line waits. A file is opened only when it has grown."""
        first = path not in self._at
        at = self._at.setdefault(path, 0)
        try:
            if path.stat().st_size <= at:
                return []
            with path.open("rb") as file:
                file.seek(at)
                data = file.read()
        except OSError:
            return []  # removed or made unreadable meanwhile
        end = data.rfind(b"\n") + 1  # 0 when no line is complete
        self._at[path] = at + end
        lines = data[:end].decode(errors="replace").splitlines()
        return lines[-self._tail :] if first and self._tail else lines


def ended(run: RunFolder) -> bool:
    """Whether the files alone say that the run is over: done or stopped, and its newest attempt has ended."""
    last = run.attempts[-1] if run.attempts else None
    over = run.done or (run.path / "stop").exists()
    return over and (last is None or "ended" in last.result)


def _rank(path: Path) -> int | None:
    match = re.fullmatch(r"\d+\.(\d+)", path.stem)
    return int(match[1]) if match else None


def _who(path: Path) -> str:
    match = re.fullmatch(r"(\d+)\.(\d+)", path.stem)
    return f"node {match[1]} rank {match[2]}" if match else path.stem
