"""Real NeMo runs on the testbed: `tiny_llama3` on two nodes with one rank each, on gloo."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from superpod.runtime.runs.run_folder import RunFolder
from tests.slurm.testbed.bed import Testbed, write_profile
from tests.slurm.testbed.runs import BedRun, parse_run_folder

LONGEST = 3000
"""Steps that one epoch of the data holds: so runs of any length up to this one see the same data in the same order."""

SETTINGS = (
    "data.seq_length=64",
    "model.config.seq_length=64",
    "data.micro_batch_size=2",
    "data.global_batch_size=8",
    "trainer.limit_val_batches=0",
    "trainer.limit_test_batches=0",
    "trainer.devices=1",
    "trainer.strategy.tensor_model_parallel_size=1",
    "trainer.strategy.sequence_parallel=False",
    "trainer.callbacks[2].tp_comm_overlap=False",
    "optim.lr_scheduler.warmup_steps=5",  # given, as a recipe's is fitted to the number of steps
    "optim.lr_scheduler.min_lr=0.003",  # as after the warm-up: a decay would depend on the number of steps
)

Cli = Callable[..., subprocess.CompletedProcess[str]]


class Nemo:
    """Data of real NeMo runs shared in a session: training data, and the losses of an undisturbed run."""

    def __init__(self, testbed: Testbed, folder: Path, cli: Cli) -> None:
        self.testbed, self.folder, self.cli = testbed, folder, cli
        self._losses: list[float] = []

    @property
    def data(self) -> Path:
        """Modules of the standard library as a data folder with a vocabulary of 512."""
        data = self.folder / "data"
        if not data.exists():
            library = Path(json.__file__).parents[1]
            source = ("--text", library / "*.py", "--text", library / "asyncio" / "*.py")
            done = self.cli("data", "build", *source, "--vocab-size", 512, "--split", "8,1,1", "--out", data)
            assert done.returncode == 0, done.stderr
            tokens = json.loads((data / "dataset.json").read_text())["tokens"]
            assert 0.8 * tokens > 64 * 8 * LONGEST, "two epochs are shuffled in another order than one"
        return data

    def losses(self, steps: int) -> list[float]:
        """Of the first steps of a run where nothing happens: one such run is made, and a longer one when it is needed.

        Alone on the testbed, so not while another run is on it.
        """
        if steps > len(self._losses):
            where = write_profile(self.folder / "undisturbed.toml", self.folder / "runs")
            run = NemoRun(self, where, attempts=1, max_steps=max(steps, 120), save_every=10_000, time_limit="1:00:00")
            run.until_done(1200)
            assert run.lost() == [], run.story()
            self._losses = [line["loss"] for line in run.run.metrics()]
            assert len(set(self._losses)) > 0.9 * len(self._losses), "a loss that says which step it is of"
        return self._losses[:steps]


class NemoRun(BedRun):
    """A run of `tiny_llama3` with the recipe's asynchronous checkpoints."""

    rank_command = "superpod.rehearsal.rank"
    patience = 4
    in_flight = 5

    def __init__(
        self,
        nemo: Nemo,
        profile: Path,
        attempts: int = 3,
        max_steps: int = 120,
        save_every: int = 10,
        time_limit: str = "",
        data: Path | None = None,
        after: str = "",
    ) -> None:
        assert max_steps <= LONGEST
        self.nemo = nemo
        steps = (
            f"trainer.max_steps={max_steps}",
            f"log.ckpt.every_n_train_steps={save_every}",
            "log.ckpt.save_top_k=3",
        )
        where = ("--cluster", profile, "--nodes", 2, "--data", data or nemo.data, "--attempts", attempts)
        limit = ("--time", time_limit) if time_limit else ()
        waits = ("--after", after) if after else ()
        done = nemo.cli("submit", "tiny_llama3", *where, *limit, *waits, *SETTINGS, *steps, timeout=400)
        assert done.returncode == 0, done.stderr
        self.printed: str = done.stdout
        """by `recipes submit`"""
        super().__init__(nemo.testbed, RunFolder.open(parse_run_folder(done.stdout)), max_steps, save_every)

    def undisturbed(self) -> list[float]:
        """Of the session's undisturbed run."""
        return self.nemo.losses(self.max_steps)
