"""The same fault in two trainings: the fast toy, and real NeMo. Each writes a line of docs/slurm.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slurm.testbed.bed import Testbed
from tests.slurm.testbed.fault_table import Line, write
from tests.slurm.testbed.nemo_runs import Nemo, NemoRun
from tests.slurm.testbed.runs import BedRun
from tests.slurm.testbed.toys import ToyRun

KINDS = ["toy", pytest.param("nemo", marks=[pytest.mark.nemo, pytest.mark.train])]


@dataclass(frozen=True)
class Training:
    """A kind of training, and the folder of its runs."""

    testbed: Testbed
    profile: Callable[..., Path]
    nemo: Nemo | None
    """None: the toy"""
    writes: bool
    """whether docs/slurm.md gets a line of every case"""

    @property
    def steps(self) -> int:
        """For some 30 s of training."""
        return 70 if self.nemo else 220

    @property
    def shortest_limit(self) -> str:
        """The time limit of a job that makes some steps: NeMo starts for 30 s, and for 3 min on a busy machine."""
        return "5:00" if self.nemo else "1:00"

    def start(
        self,
        *changes: tuple[str, str],
        where: Path | None = None,
        attempts: int = 4,
        steps: int = 0,
        save_every: int = 10,
        time_limit: str = "10:00",
        **toy: float,
    ) -> BedRun:
        """A run on two nodes, with the profile's text changed; `toy` are options that only the toy has."""
        where = where or self.profile(*changes)
        steps = steps or self.steps
        if self.nemo:
            return NemoRun(self.nemo, where, attempts, steps, save_every, time_limit)
        options = {"max_steps": steps, "save_every": save_every, **toy}
        return ToyRun(self.testbed, where, attempts=attempts, time_limit=time_limit, options=options)

    def at_step_15(self) -> BedRun:
        """A run that has saved once."""
        run = self.start()
        run.until_step(15)
        return run

    def ends_well(self, run: BedRun, fault: str, least_attempts: int = 2, most_lost: int | None = None) -> None:
        """Assert that the run ends as if undisturbed; `fault` names its line in the documentation."""
        run.until_done(400)
        run.check_whole(most_lost)
        assert len(run.run.attempts) >= least_attempts, run.story()
        assert run.left_behind() == []
        assert run.seen().jobs == []
        self.note(run, fault)

    def note(self, run: BedRun, fault: str) -> None:
        """Write a line of the documentation, with --update-goldens."""
        if self.writes:
            write(Line.from_run(fault, "NeMo" if self.nemo else "toy", run))


@pytest.fixture(params=KINDS)
def training(request: pytest.FixtureRequest, testbed: Testbed, profile: Callable[..., Path]) -> Training:
    """The toy, then NeMo."""
    nemo = request.getfixturevalue("nemo") if request.param == "nemo" else None
    return Training(testbed, profile, nemo, bool(request.config.getoption("--update-goldens")))
