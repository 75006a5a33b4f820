"""What `--profile` asks for: a profiler, steps and ranks; as text in a request, and as callbacks in a configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from superpod.errors import UserError, did_you_mean
from superpod.runtime.rank import nsys

if TYPE_CHECKING:
    import nemo_run as run

    from superpod.collection.facts.environment import Variable

TOOLS = ("torch", "nsys")
MAX_STEPS = 100
"""A trace of a step has 10 to 500 MB."""
MAX_RANKS = 64


@dataclass(frozen=True)
class ProfileRequest:
    """Steps `first` to `last`, counted from 1 as metrics.jsonl counts them, on some ranks."""

    tool: str
    first: int
    last: int
    ranks: tuple[int, ...]

    @classmethod
    def from_options(cls, tool: str, steps: str, ranks: str) -> ProfileRequest:
        """Of `--profile`, `--profile-steps 10-12` and `--profile-ranks 0,8`.

        Raises:
            UserError: no such profiler, or no such steps or ranks.
        """
        if tool not in TOOLS:
            raise UserError(
                f"--profile {tool[:60]!r} is no profiler",
                did_you_mean(tool, [*TOOLS]) or "torch, or nsys (Nsight Systems)",
            )
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", steps.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise UserError(f"--profile-steps {steps[:60]!r} are no steps", "such as 10-12, or 10; the first step is 1")
        if last - first >= MAX_STEPS:
            raise UserError(
                f"--profile-steps {steps} are {last - first + 1:,} steps, and a trace takes {MAX_STEPS} at most: each "
                "has 10 to 500 MB",
                "three steps show what repeats: 10-12",
            )
        if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", ranks.strip()):
            raise UserError(f"--profile-ranks {ranks[:60]!r} are no ranks", "such as 0, or 0,8")
        chosen = tuple(sorted({int(rank) for rank in ranks.strip().split(",")}))
        if len(chosen) > MAX_RANKS:
            raise UserError(
                f"--profile-ranks names {len(chosen)} ranks; {MAX_RANKS} at most",
                "one of each pipeline rank says it all: ranks of one stage do the same",
            )
        return cls(tool, first, last, chosen)

    @classmethod
    def parse(cls, text: str) -> ProfileRequest:
        """Of a request's `profile`, as `str` gives it. Raises UserError as `from_options`."""
        tool, _, rest = text.partition(":")
        steps, _, ranks = rest.partition(":")
        return cls.from_options(tool, steps, ranks)

    def __str__(self) -> str:
        return f"{self.tool}:{self.first}-{self.last}:{','.join(map(str, self.ranks))}"

    @property
    def steps(self) -> str:
        """`steps 10 to 12`"""
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"

    def add_to(self, partial: run.Partial) -> None:
        """Give a configuration the callbacks of the profiler.

        Raises:
            UserError: the run ends before these steps, or has no such rank.
        """
        from superpod.nemo2.build import profiling

        size, most = partial.trainer.num_nodes * partial.trainer.devices, partial.trainer.max_steps
        if self.last > most:
            raise UserError(
                f"--profile-steps {self.first}-{self.last}: the run has {most:,} steps, and a profile is written after "
                "its last",
                f"--profile-steps {max(1, most - 2)}-{most}",
            )
        if self.ranks[-1] >= size:
            raise UserError(
                f"--profile-ranks {self.ranks[-1]}: the run has {size:,} ranks, 0 to {size - 1:,}", "--profile-ranks 0"
            )
        callback = (
            profiling.nsys(self.first, self.last, self.ranks)
            if self.tool == "nsys"
            else profiling.torch_profiler(
                self.first, self.last
            )  # its ranks are a fact of the run (runtime/rank/profiled.py)
        )
        partial.trainer.callbacks = [*(partial.trainer.callbacks or []), callback]

    def variables(self) -> list[Variable]:
        """What the ranks of a Slurm job need in their environment."""
        from superpod.collection.facts.environment import Variable

        if self.tool != "nsys":
            return []
        ranks = ",".join(map(str, self.ranks))
        return [
            Variable(
                nsys.RANKS, ranks, "these start under `nsys profile` (runtime/rank/nsys.py), if their image has nsys"
            )
        ]
