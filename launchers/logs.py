"""What ranks have written, over links and nodes, as one stream that can be followed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from superpod.launchers.rundir import Link, RunDir


class Reader:
    """Reads the logs of a run in the order of links and ranks, and later only what is new."""

    def __init__(
        self, run: RunDir, *, rank: int | None = None, all_ranks: bool = False, link: str = "", tail: int = 0
    ) -> None:
        self._run, self._rank, self._all, self._link, self._tail = run, rank, all_ranks, link, tail
        self._at: dict[Path, int] = {}

    def new(self) -> Iterator[str]:
        """Every line that was not given before, with its link, node and rank."""
        for link in self._run.links:
            if self._link and link.name != self._link.zfill(3):
                continue
            for path in self._files(link):
                for line in self._lines(path):
                    yield f"[{link.name} {_who(path)}] {line}"

    def _files(self, link: Link) -> list[Path]:
        ranks = link.logs
        if self._all:
            return ranks
        wanted = self._rank if self._rank is not None else 0
        chosen = [path for path in ranks if _rank(path) == wanted]
        if self._rank is None and link.result.get("state") in ("failed", "stalled"):
            chosen += [path for path in ranks if _rank(path) is None]  # srun's own words
        return chosen

    def _lines(self, path: Path) -> list[str]:
        """Whole lines from where reading stopped; a line in the making waits."""
        first = path not in self._at
        at = self._at.setdefault(path, 0)
        with path.open("rb") as file:
            file.seek(at)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._at[path] = at + end
        lines = data[:end].decode(errors="replace").splitlines()
        return lines[-self._tail :] if first and self._tail else lines


def _rank(path: Path) -> int | None:
    match = re.fullmatch(r"\d+\.(\d+)", path.stem)
    return int(match[1]) if match else None


def _who(path: Path) -> str:
    match = re.fullmatch(r"(\d+)\.(\d+)", path.stem)
    return f"node {match[1]} rank {match[2]}" if match else path.stem
