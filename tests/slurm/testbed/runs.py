"""A run on the testbed, independent of its training: queries, and what must hold at its end."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from superpod.common.json_files import read_lines
from superpod.runtime.attempts import guard
from superpod.runtime.runs.run_folder import RunFolder
from superpod.slurm.status import run_views
from superpod.slurm.submission import connection, submit
from tests.slurm.jobs import edited
from tests.slurm.testbed.bed import Testbed, until


class BedRun:
    """A run on the testbed. Subclasses define the losses, the ranks' command and the steps that may be repeated."""

    rank_command = ""
    """part of a rank's command line"""
    patience = 1
    """factor for time limits, relative to the toy"""
    in_flight = 0
    """steps made while a checkpoint is written asynchronously; a kill during that time repeats them too"""

    def __init__(self, testbed: Testbed, run: RunFolder, max_steps: int, save_every: int) -> None:
        self.testbed, self.run, self.max_steps, self.save_every = testbed, run, max_steps, save_every

    def undisturbed(self) -> list[float]:
        """Return the losses of all steps of an undisturbed run."""
        raise NotImplementedError

    def end_at(self, step: int) -> None:
        """Set the last step for the next attempt, and for the current one if its ranks have not read the recipe yet."""
        # Pending jobs are cancelled below. A requeued one among them would end the run as cancelled by its user.
        until(lambda: self.seen().state == "running", 180 * self.patience, self.story)
        before, self.max_steps = str(self.max_steps), step
        assert self.recipe.read_text().count(before) == 1
        self.recipe.write_text(self.recipe.read_text().replace(before, str(step)))
        script = self.run.path / submit.SCRIPT
        script.write_text(edited(script.read_text(), before, str(step)))
        waiting = [job.id for job in self.seen().jobs or [] if job.state == "PENDING"]  # they have the old script
        for job in waiting:
            self.testbed.slurm("scancel", job)
        self.queue(len(waiting))

    @property
    def recipe(self) -> Path:
        """The recipe that the ranks of the latest attempt execute."""
        (code,) = self.run.path.glob("code.*")
        return code / "recipe.py"

    def queue(self, attempts: int) -> None:
        """Queue more attempts."""
        submit.append_jobs(self.run, submit.queue(connection.Connection(), str(self.run.path), attempts).ids)

    @property
    def step(self) -> int:
        """The latest step."""
        lines = self.run.metrics()
        return lines[-1]["step"] if lines else 0

    @property
    def job(self) -> str:
        """The job of the latest attempt."""
        return str(self.run.attempts[-1].result["job"])

    def ranks(self) -> list[int]:
        """List the process ids of its ranks, without srun and similar processes, and without children of ranks."""
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

    def seen(self) -> run_views.RunView:
        """Return the row of `recipes status`."""
        return run_views.summarize_runs([self.run], connection.Connection())[0]

    def until_step(self, step: int, limit_s: float = 120) -> None:
        """Wait for a step."""
        until(lambda: self.step >= step, limit_s * self.patience, self.story)

    def until_new_checkpoint(self, limit_s: float = 180) -> None:
        """Wait for a new checkpoint, or the end."""
        before = guard.newest_step(self.run)
        until(lambda: self.run.done or guard.newest_step(self.run) > before, limit_s * self.patience, self.story)

    def until_done(self, limit_s: float = 300) -> None:
        """Wait for the done marker and an empty queue."""
        is_over = ("failed", "cancelled")
        until(lambda: self.run.done or self.seen().state in is_over, limit_s * self.patience, self.story)
        assert self.run.done, self.story()
        self.until_gone()

    def until_gone_or_done(self, limit_s: float = 180) -> None:
        """Wait until the run is done or has no jobs."""
        until(lambda: self.run.done or self.seen().jobs == [], limit_s * self.patience, self.story)

    def until_gone(self, limit_s: float = 60) -> None:
        """Wait until the run has no jobs."""
        until(lambda: self.seen().jobs == [], limit_s * self.patience, self.story)

    def story(self) -> str:
        """Describe the run and its logs, for the message of a failed test."""
        seen = self.seen()
        lines = [f"{seen.state} {seen.message} step {seen.step}, jobs {seen.jobs}"]
        for attempt in self.run.attempts:
            lines.append(f"{attempt.name}: {attempt.result}")
            lines += [f"  {log.name}: {log.read_text()[-600 * self.patience :]}" for log in attempt.logs]
        for out in sorted(self.run.path.glob("slurm-*.out")):
            lines.append(f"{out.name}: {out.read_text()[-1500:]}")
        return "\n".join(lines)

    def check_whole(self, most_lost: int | None = None) -> None:
        """Assert that every step has the loss of an undisturbed run; an attempt may repeat one interval."""
        lines = self.run.metrics()
        assert [line["step"] for line in lines] == list(range(1, self.max_steps + 1)), self.story()
        for line, loss in zip(lines, self.undisturbed(), strict=True):
            assert line["loss"] == loss, f"step {line['step']} has another loss than {loss}\n{self.story()}"
        lost = self.lost()
        limit = self.save_every + self.in_flight if most_lost is None else most_lost
        assert all(n <= limit for n in lost), f"{lost}\n{self.story()}"

    def lost(self) -> list[int]:
        """Return the number of steps that each later attempt repeated."""
        written = [line for line in read_lines(self.run.path / "metrics.jsonl") if "step" in line]
        lost, reached, attempt = [], 0, None
        for line in written:
            if attempt is not None and line["attempt"] != attempt:
                lost.append(reached + 1 - line["step"])
            reached, attempt = line["step"], line["attempt"]
        return lost

    def left_behind(self) -> list[str]:
        """List the processes of the run that remain after up to 30 s."""
        end = time.monotonic() + 30
        alive = self.testbed.processes(str(self.run.path))
        while alive and time.monotonic() < end:
            time.sleep(0.5)
            alive = self.testbed.processes(str(self.run.path))
        return alive


def parse_run_folder(stdout: str) -> Path:
    """Parse the run folder from the output of `recipes submit`."""
    (folder,) = (line.split(maxsplit=1)[1] for line in stdout.splitlines() if line.startswith("run "))
    return Path(folder)
