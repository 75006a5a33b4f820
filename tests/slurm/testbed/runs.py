"""A run on the testbed, whatever trains in it: what a test asks of it, and what must hold at its end."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from superpod.node import guard
from superpod.node.files import read_lines
from superpod.node.run_folder import RunFolder
from superpod.slurm import connection, submit, watch
from tests.slurm.jobs import edited
from tests.slurm.testbed.bed import Testbed, until


class BedRun:
    """A run of the testbed. Losses, the ranks' command and the steps that may be repeated are the training's."""

    rank_command = ""
    """what the command line of a rank holds"""
    patience = 1
    """how many times as long as the toy it may take"""
    in_flight = 0
    """steps made while a checkpoint is written in the background: a kill in that time repeats these too"""

    def __init__(self, testbed: Testbed, run: RunFolder, max_steps: int, save_every: int) -> None:
        self.testbed, self.run, self.max_steps, self.save_every = testbed, run, max_steps, save_every

    def undisturbed(self) -> list[float]:
        """The losses of all its steps where nothing happens."""
        raise NotImplementedError

    def end_at(self, step: int) -> None:
        """From the next attempt on, this is its last step; from this one on, where its ranks have not read it yet."""
        # Pending jobs are cancelled below; were a requeued one among them, the run would end as cancelled by its user.
        until(lambda: self.seen().state == "running", 180 * self.patience, self.story)
        before, self.max_steps = str(self.max_steps), step
        assert self.recipe.read_text().count(before) == 1
        self.recipe.write_text(self.recipe.read_text().replace(before, str(step)))
        script = self.run.path / submit.SCRIPT
        script.write_text(edited(script.read_text(), before, str(step)))
        waiting = [job.id for job in self.seen().jobs or [] if job.state == "PENDING"]  # each has the script it got
        for job in waiting:
            self.testbed.slurm("scancel", job)
        self.queue(len(waiting))

    @property
    def recipe(self) -> Path:
        """The recipe of the newest attempt, as its ranks execute it."""
        (code,) = self.run.path.glob("code.*")
        return code / "recipe.py"

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
        """Its ranks, as this machine numbers their processes: not srun and the like, and not what they start."""
        listed = subprocess.run(["ps", "-eo", "pid,ppid,stat,args", "-ww"], capture_output=True, text=True).stdout
        others = ("slurmstepd", "srun", "attempt.py", "/bin/bash")
        lines = [line.split(maxsplit=3) for line in listed.splitlines()]
        mine = {
            int(pid): int(parent)
            for pid, parent, stat, words in lines[1:]
            if self.rank_command in words
            and str(self.run.path) in words
            and "Z" not in stat
            and not any(other in words for other in others)
        }
        return [pid for pid, parent in mine.items() if parent not in mine]

    def seen(self) -> watch.RunView:
        """As `recipes status` sees it."""
        return watch.views([self.run], connection.Connection())[0]

    def until_step(self, step: int, limit_s: float = 120) -> None:
        """Wait for a step."""
        until(lambda: self.step >= step, limit_s * self.patience, self.story)

    def until_new_checkpoint(self, limit_s: float = 180) -> None:
        """Wait for a checkpoint that is not there yet, or the end."""
        before = guard.newest_step(self.run)
        until(lambda: self.run.done or guard.newest_step(self.run) > before, limit_s * self.patience, self.story)

    def until_done(self, limit_s: float = 300) -> None:
        """Wait for the done marker and an empty queue."""
        is_over = ("failed", "cancelled")
        until(lambda: self.run.done or self.seen().state in is_over, limit_s * self.patience, self.story)
        assert self.run.done, self.story()
        self.until_gone()

    def until_gone_or_done(self, limit_s: float = 180) -> None:
        """Wait until the run is done, or has nothing queued."""
        until(lambda: self.run.done or self.seen().jobs == [], limit_s * self.patience, self.story)

    def until_gone(self, limit_s: float = 60) -> None:
        """Wait until no job of the run is left."""
        until(lambda: self.seen().jobs == [], limit_s * self.patience, self.story)

    def story(self) -> str:
        """Everything that explains a failure."""
        seen = self.seen()
        words = [f"{seen.state} {seen.message} step {seen.step}, jobs {seen.jobs}"]
        for attempt in self.run.attempts:
            words.append(f"{attempt.name}: {attempt.result}")
            words += [f"  {log.name}: {log.read_text()[-600 * self.patience :]}" for log in attempt.logs]
        for out in sorted(self.run.path.glob("slurm-*.out")):
            words.append(f"{out.name}: {out.read_text()[-1500:]}")
        return "\n".join(words)

    def check_whole(self, most_lost: int | None = None) -> None:
        """Every step is there, with the loss of an undisturbed run; an attempt repeats one interval at most."""
        lines = self.run.metrics()
        assert [line["step"] for line in lines] == list(range(1, self.max_steps + 1)), self.story()
        for line, loss in zip(lines, self.undisturbed(), strict=True):
            assert line["loss"] == loss, f"step {line['step']} has another loss than {loss}\n{self.story()}"
        lost = self.lost()
        limit = self.save_every + self.in_flight if most_lost is None else most_lost
        assert all(n <= limit for n in lost), f"{lost}\n{self.story()}"

    def lost(self) -> list[int]:
        """Steps that every later attempt had to repeat."""
        written = [line for line in read_lines(self.run.path / "metrics.jsonl") if "step" in line]
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


def folder_of(stdout: str) -> Path:
    """The run folder that `recipes submit` has printed."""
    (folder,) = (line.split(maxsplit=1)[1] for line in stdout.splitlines() if line.startswith("run "))
    return Path(folder)
