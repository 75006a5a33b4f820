"""Reads the logs of all attempts and ranks of a run as one stream that can be followed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from superpod.common.redaction import LineRedactor
from superpod.diagnosis.log_lines import without_codes
from superpod.diagnosis.rank_logs import Line, is_by_node, node_of, parse, rank_of
from superpod.runtime.runs.run_folder import Attempt, RunFolder
from superpod.runtime.runs.run_state import State


class LogReader:
    """Reads the logs of a run by attempt and rank. Each call of `read_new` reads only new lines.

    Terminal control codes and secrets are removed from the lines.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        rank: int | None = None,
        all_ranks: bool = False,
        attempt: str = "",
        tail: int = 0,
        last_bytes: int = 0,
    ) -> None:
        """Select the logs to read.

        Args:
            run: the run.
            rank: the rank to read; None for rank 0, and the log of srun if the attempt failed.
            all_ranks: whether to read all ranks.
            attempt: the attempt to read; "" for all.
            tail: number of lines at the end of each file to return at first; 0 for all.
            last_bytes: number of bytes at the end of each file to read at first; 0 for all.
        """
        self._run, self._rank, self._all, self._attempt, self._tail = run, rank, all_ranks, attempt, tail
        self._last_bytes = last_bytes
        self._at: dict[Path, int] = {}
        self._redactors: dict[tuple[Path, int | None], LineRedactor] = {}
        """by log and rank, because a log may interleave the lines of several ranks"""
        self._closed: set[str] = set()
        """attempts that had ended when they were last read"""
        self.files = 0
        """number of files read by the last call of `read_new`"""

    @property
    def is_empty(self) -> bool:
        """Whether no log has been found so far."""
        return not self._at

    def read_new(self) -> Iterator[str]:
        """Yield the new lines, each with its attempt, node and rank as a prefix.

        The output of jobs without an attempt comes last; it shows why the batch script ended.
        """
        attempts, self.files = self._run.attempts, 0
        for attempt in attempts:
            if attempt.name in self._closed or (self._attempt and attempt.name != self._attempt.zfill(3)):
                continue
            has_end = "ended" in attempt.result
            for path in self._select_logs(attempt):
                self.files += 1
                for line in self._read_lines(path, by_rank=True):
                    yield f"[{attempt.name} {_format_label(path, line.rank)}] {line.text}"
            if has_end:
                self._closed.add(attempt.name)
        if self._rank is None and not self._attempt:
            for path in self._find_job_outputs(attempts):
                for line in self._read_lines(path):
                    yield f"[{path.stem}] {line.text}"

    def _select_logs(self, attempt: Attempt) -> list[Path]:
        logs = attempt.logs
        if self._all:
            return logs
        rank = self._rank if self._rank is not None else 0

        # Some logs contain all ranks of a node: use the log of the rank's node if the ranks per node are known.
        size = self._run.facts.get("gpus_per_node")
        node = rank // size if isinstance(size, int) and size > 0 else None
        by_node = [path for path in logs if is_by_node(path) and node in (None, node_of(path))]
        chosen_logs = by_node or [path for path in logs if rank_of(path) == rank]
        if self._rank is None and attempt.result.get("state") in (State.FAILED, State.STALLED):
            chosen_logs += [path for path in logs if node_of(path) is None]  # srun.log: why srun terminated the ranks
        return chosen_logs

    def _find_job_outputs(self, attempts: list[Attempt]) -> list[Path]:
        """Return the outputs `slurm-JOB.out` of jobs that started no attempt."""
        jobs = {str(attempt.result.get("job", "")) for attempt in attempts}
        outputs = sorted(self._run.path.glob("slurm-*.out"))
        return [path for path in outputs if path.stem.removeprefix("slurm-") not in jobs]

    def _read_lines(self, path: Path, by_rank: bool = False) -> list[Line]:
        """Return the new complete lines of a log, with their ranks if `by_rank` is set."""
        first = path not in self._at
        try:
            size = path.stat().st_size
            start = max(0, size - self._last_bytes) if self._last_bytes else 0
            offset = self._at.setdefault(path, start)
            if size <= offset:
                return []
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
        except OSError:
            return []  # removed or made unreadable in the meantime
        end = data.rfind(b"\n") + 1  # 0 if no line is complete
        self._at[path] = offset + end
        new_lines = data[:end].decode(errors="replace").removesuffix("\n").split("\n")
        labelled_lines = [parse(path, line) if by_rank else Line(None, line) for line in new_lines]
        if by_rank and is_by_node(path) and not self._all:
            labelled_lines = [line for line in labelled_lines if line.rank == (self._rank or 0)]
        # A progress bar rewrites its line with carriage returns: the label precedes only the first part.
        parsed_lines = [
            Line(line.rank, self._redact(path, line.rank, text))
            for line in labelled_lines
            for text in line.text.splitlines() or [""]
        ]
        return parsed_lines[-self._tail :] if first and self._tail else parsed_lines

    def _redact(self, path: Path, rank: int | None, text: str) -> str:
        redact = self._redactors.setdefault((path, rank), LineRedactor())
        return redact(without_codes(text))


def has_ended(run: RunFolder) -> bool:
    """Return whether a run is done or stopped, and its latest attempt has recorded its end."""
    last = run.attempts[-1] if run.attempts else None
    over = run.done or run.stop is not None
    return over and (last is None or "ended" in last.result)


def _format_label(path: Path, rank: int | None) -> str:
    node = node_of(path)
    if node is None:
        return path.stem
    return f"node {node}" if rank is None else f"node {node} rank {rank}"
