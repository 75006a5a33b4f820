"""Parse `--profile` (profiler, steps and ranks), and convert it to text for a request or to a Lightning callback."""

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
"""Maximum number of profiled steps: the trace of each has 10 to 500 MB."""
MAX_RANKS = 64


@dataclass(frozen=True)
class ProfileRequest:
    """A request to profile the steps `first` to `last` on some ranks. Steps are counted from 1, as in metrics.jsonl."""

    tool: str
    first: int
    last: int
    ranks: tuple[int, ...]

    @classmethod
    def from_options(cls, tool: str, steps: str, ranks: str) -> ProfileRequest:
        """Parse the values of `--profile`, `--profile-steps 10-12` and `--profile-ranks 0,8`.

        Raises UserError for an unknown profiler, and for invalid or too many steps or ranks.
        """
        if tool not in TOOLS:
            raise UserError(
                f"--profile {tool[:60]!r} is not a profiler",
                did_you_mean(tool, [*TOOLS]) or "use torch or nsys (Nsight Systems)",
            )
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", steps.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise UserError(
                f"--profile-steps {steps[:60]!r} must be a step or a range of steps, counted from 1",
                "use for example 10-12, or 10",
            )
        if last - first >= MAX_STEPS:
            raise UserError(
                f"--profile-steps {steps}: {last - first + 1:,} steps exceed the maximum of {MAX_STEPS}; the trace of "
                "each step takes 10 to 500 MB",
                "three steps are usually enough, for example 10-12",
            )
        if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", ranks.strip()):
            raise UserError(f"--profile-ranks {ranks[:60]!r} must be a list of ranks", "use for example 0, or 0,8")
        selected_ranks = tuple(sorted({int(rank) for rank in ranks.strip().split(",")}))
        if len(selected_ranks) > MAX_RANKS:
            raise UserError(
                f"--profile-ranks: {len(selected_ranks)} ranks exceed the maximum of {MAX_RANKS}",
                "one rank per pipeline stage is usually enough",
            )
        return cls(tool, first, last, selected_ranks)

    @classmethod
    def parse(cls, text: str) -> ProfileRequest:
        """Parse the text that `__str__` returns. Raises UserError like `from_options`."""
        tool, _, rest = text.partition(":")
        steps, _, ranks = rest.partition(":")
        return cls.from_options(tool, steps, ranks)

    def __str__(self) -> str:
        return f"{self.tool}:{self.first}-{self.last}:{','.join(map(str, self.ranks))}"

    @property
    def steps(self) -> str:
        """The steps as text: "steps 10 to 12" or "step 10"."""
        if self.first == self.last:
            return f"step {self.first}"
        return f"steps {self.first} to {self.last}"

    def add_to(self, partial: run.Partial) -> None:
        """Append the profiler's callback to a configuration. Raises UserError if a step or rank does not exist."""
        from superpod.nemo2.build import profiling

        world, max_steps = partial.trainer.num_nodes * partial.trainer.devices, partial.trainer.max_steps
        if self.last > max_steps:
            raise UserError(
                f"--profile-steps {self.first}-{self.last}: the run has only {max_steps:,} steps",
                f"use --profile-steps {max(1, max_steps - 2)}-{max_steps}",
            )
        if self.ranks[-1] >= world:
            raise UserError(
                f"--profile-ranks {self.ranks[-1]}: the run has {world:,} ranks, 0 to {world - 1:,}",
                "use --profile-ranks 0",
            )
        if self.tool == "nsys":
            callback = profiling.nsys(self.first, self.last, self.ranks)
        else:
            callback = profiling.torch_profiler(self.first, self.last)  # runtime/rank/profiled.py selects the ranks
        partial.trainer.callbacks = [*(partial.trainer.callbacks or []), callback]

    def variables(self) -> list[Variable]:
        """Return the environment variables of a Slurm job's ranks that the profiler needs; [] if none."""
        from superpod.collection.facts.environment import Variable

        if self.tool != "nsys":
            return []
        ranks = ",".join(map(str, self.ranks))
        reason = "ranks to start under `nsys profile`, if the container image has nsys (runtime/rank/nsys.py)"
        return [Variable(nsys.RANKS, ranks, reason)]
