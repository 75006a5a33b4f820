"""A fake run that grows: a run folder with metrics, heartbeats and a log as a training run would write them."""

import math
import time

from superpod.common.json_files import append_line
from superpod.runtime.heartbeat import heartbeat_pages
from superpod.runtime.runs.run_folder import RunFolder

RANKS = 8


class GrowingRun:
    """Its folder, and what makes it grow; it is Slurm's run if `job` is given."""

    def __init__(self, runs, recipe="tiny_llama3", job="", **facts):
        facts = {"max_steps": 200, "nodes": 1, "gpus_per_node": RANKS, **facts}
        self.run = RunFolder.create(runs, recipe, facts=facts, recipe_lines=["a = 1"])
        self.attempt = self.run.new_attempt(job=job)
        self.step = 0

    @property
    def path(self):
        return self.run.path

    def grow(self, steps, words="consumed samples"):
        for _ in range(steps):
            self.step += 1
            line = {"t": time.time(), "attempt": "001", "step": self.step, "loss": 2 + 8 * math.exp(-self.step / 40)}
            line |= {"val_loss": None, "tokens": 64 * self.step, "step_tokens": 64, "step_time_s": 0.1}
            append_line(self.path / "metrics.jsonl", {**line, "tokens_per_s_per_gpu": 500.0 + self.step % 7})
        with (self.attempt.path / "logs" / "0.0.log").open("a") as log:
            log.write(f"step {self.step} {words}\n")

    def beat(self, *, behind=(), silent=(), now=None):
        """All ranks at this step; those `behind` two steps before it, those `silent` since five minutes."""
        now = now or time.time()
        page = heartbeat_pages.header(heartbeat_pages.RankLocation(0, 0, RANKS, RANKS), now, "node1")
        for rank in range(RANKS):
            alive = now - 300 if rank in silent else now
            step = self.step - 2 * (rank in behind)
            page += heartbeat_pages.record(rank, step, "train", alive, alive, {})
        (self.attempt.path / "heartbeat" / "nodes").write_bytes(page)
