"""Toy runs on the testbed with the real script, controller, chain and folders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from superpod.runtime.attempts import payload
from superpod.runtime.runs.run_folder import RunFolder
from superpod.slurm.profiles import profiles
from superpod.slurm.script import batch_script, cluster_variables
from superpod.slurm.submission import submit
from tests.slurm.jobs import planned
from tests.slurm.testbed.bed import Testbed
from tests.slurm.testbed.runs import BedRun

TOY = Path(__file__).parent / "toy.py"


class ToyRun(BedRun):
    """A run of the toy on so many nodes, two ranks each."""

    rank_command = TOY.name

    def __init__(
        self,
        testbed: Testbed,
        profile: Path,
        *,
        nodes: int = 2,
        gpus: int = 2,
        attempts: int = 3,
        time_limit: str = "10:00",
        options: Mapping[str, Any] | None = None,
        **more,
    ) -> None:
        self.options: dict[str, Any] = {"max_steps": 100, "save_every": 10, "step_s": 0.2, **(options or {}), **more}
        where = profiles.load(str(profile))
        facts = {"max_steps": self.options["max_steps"], "attempts": attempts, "nodes": nodes, "gpus_per_node": gpus}
        facts |= {"save_every": self.options["save_every"]}
        facts |= {"stalled_s": where.chain.stalled_s, "rehearsal": True}
        run = RunFolder.create(Path(where.folders.runs), "toy", facts=facts, recipe_lines=["toy"])
        super().__init__(testbed, run, self.options["max_steps"], self.options["save_every"])
        self.name = submit.job_name(str(self.run.path))
        script = batch_script.render(
            batch_script.BatchJob(
                recipe="toy",
                cluster=where,
                nodes=nodes,
                gpus=gpus,
                runs=where.folders.runs,
                variables=tuple(cluster_variables.variables(where, planned())),
                recipe_file=f"OPTIONS = {json.dumps(self.options)}",
                runtime=payload.pack_runtime(),
                python="python3",
                name=self.name,
                time=time_limit,
            )
        )
        assert batch_script.RANK in script
        (self.run.path / submit.SCRIPT).write_text(
            script.replace(batch_script.RANK, batch_script.shell_quote(str(TOY)))
        )
        if attempts:
            self.queue(attempts)

    def undisturbed(self) -> list[float]:
        """The chain of hashes that the toy calls its loss."""
        chain, losses = "begin", []
        for step in range(self.max_steps):
            chain = hashlib.sha256(f"{chain} {step}".encode()).hexdigest()
            losses.append(int(chain[:8], 16) / 2**32)
        return losses
