"""Runs of the toy training on the testbed: the real script, controller, chain and folders around it."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

from superpod.node import guard, payload
from superpod.node.run_folder import RunFolder
from superpod.slurm import batch_script, connection, environment, profiles, submit, watch
from tests.slurm.jobs import planned
from tests.slurm.testbed.conftest import Testbed, until

TOY = Path(__file__).parent / "toy.py"


class ToyRun:
    """A run of the toy on so many nodes, two ranks each."""

    def __init__(
        self,
        testbed: Testbed,
        profile: Path,
        *,
        nodes: int = 2,
        gpus: int = 2,
        attempts: int = 3,
        time_limit: str = "10:00",
        **options,
    ) -> None:
        self.options = {"max_steps": 100, "save_every": 10, "step_s": 0.2} | options
        self.testbed, self.attempts = testbed, attempts
        where = profiles.load(str(profile))
        facts = {"max_steps": self.options["max_steps"], "attempts": attempts, "nodes": nodes, "gpus_per_node": gpus}
        facts |= {"stalled_s": where.chain.stalled_s, "rehearsal": True}
        self.run = RunFolder.create(Path(where.folders.runs), "toy", facts=facts, recipe_lines=["toy"])
        self.name = submit.job_name(str(self.run.path))
        script = batch_script.render(
            batch_script.BatchJob(
                recipe="toy",
                cluster=where,
                nodes=nodes,
                gpus=gpus,
                runs=where.folders.runs,
                variables=tuple(environment.variables(where, planned())),
                recipe_file=f"OPTIONS = {json.dumps(self.options)}",
                runtime=payload.runtime(),
                python="python3",
                name=self.name,
                time=time_limit,
            )
        )
        ranks = "-m superpod.rehearsal.rank"
        assert ranks in script
        (self.run.path / submit.SCRIPT).write_text(script.replace(ranks, batch_script.quoted(str(TOY))))
        if attempts:
            self.queue(attempts)

    def queue(self, attempts: int) -> None:
        """More attempts."""
        submit.note(self.run, submit.queue(connection.Connection(), str(self.run.path), attempts).ids)

    @property
    def step(self) -> int:
        """The newest step."""
        lines = self.run.metrics()
        return lines[-1]["step"] if lines else 0

    @property
    def job(self) -> str:
        """The job of the newest attempt."""
        return str(self.run.attempts[-1].result["job"])

    def ranks(self) -> list[int]:
        """Its ranks, as this machine numbers their processes."""
        others = ("slurmstepd", "srun", "attempt.py")
        mine = [line for line in self.testbed.processes("toy.py") if str(self.run.path) in line]
        return [int(line.split()[0]) for line in mine if not any(word in line for word in others)]

    def seen(self) -> watch.RunView:
        """As `recipes status` sees it."""
        return watch.views([self.run], connection.Connection())[0]

    def until_step(self, step: int, limit_s: float = 120) -> None:
        """Wait for a step."""
        until(lambda: self.step >= step, limit_s, self.story)

    def until_new_checkpoint(self, limit_s: float = 180) -> None:
        """Wait for a checkpoint that is not there yet, or the end."""
        before = guard.newest_step(self.run)
        until(lambda: self.run.done or guard.newest_step(self.run) > before, limit_s, self.story)

    def until_done(self, limit_s: float = 300) -> None:
        """Wait for the done marker and an empty queue."""
        until(lambda: self.run.done or self.seen().state in ("failed", "cancelled"), limit_s, self.story)
        assert self.run.done, self.story()
        self.until_gone()

    def until_gone_or_done(self, limit_s: float = 180) -> None:
        """Wait until the run is done, or has nothing queued."""
        until(lambda: self.run.done or self.seen().jobs == [], limit_s, self.story)

    def until_gone(self, limit_s: float = 60) -> None:
        """Wait until no job of the run is left."""
        until(lambda: self.seen().jobs == [], limit_s, self.story)

    def story(self) -> str:
        """Everything that explains a failure."""
        seen = self.seen()
        words = [f"{seen.state} {seen.message} step {seen.step}, jobs {seen.jobs}"]
        for attempt in self.run.attempts:
            words.append(f"{attempt.name}: {attempt.result}")
            words += [f"  {log.name}: {log.read_text()[-600:]}" for log in attempt.logs]
        for out in sorted(self.run.path.glob("slurm-*.out")):
            words.append(f"{out.name}: {out.read_text()[-1500:]}")
        return "\n".join(words)

    def check_whole(self, most_lost: int | None = None) -> None:
        """Every step is there, with the loss of an uninterrupted run; an attempt repeats one interval at most."""
        lines = self.run.metrics()
        assert [line["step"] for line in lines] == list(range(1, self.options["max_steps"] + 1)), self.story()
        chain = "begin"
        for line in lines:
            chain = hashlib.sha256(f"{chain} {line['step'] - 1}".encode()).hexdigest()
            assert line["loss"] == int(chain[:8], 16) / 2**32, f"step {line['step']} has another loss\n{self.story()}"
        lost = self.lost()
        limit = self.options["save_every"] if most_lost is None else most_lost
        assert all(n <= limit for n in lost), f"{lost}\n{self.story()}"

    def lost(self) -> list[int]:
        """Steps that every later attempt had to repeat."""
        written = [json.loads(line) for line in (self.run.path / "metrics.jsonl").read_text().splitlines()]
        lost, reached, attempt = [], 0, None
        for line in written:
            if attempt is not None and line["attempt"] != attempt:
                lost.append(reached + 1 - line["step"])
            reached, attempt = line["step"], line["attempt"]
        return lost

    def left_behind(self) -> list[str]:
        """Processes of the run that still live, after a moment's grace."""
        end = time.monotonic() + 30
        while (alive := self.testbed.processes(str(self.run.path))) and time.monotonic() < end:
            time.sleep(0.5)
        return alive
