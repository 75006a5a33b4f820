"""The testbed's Slurm, its faults and its profile as Python objects."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from superpod.slurm.profiles import profiles

SCRIPT = Path(__file__).parent / "testbed.sh"
BASE = Path(os.environ.get("TESTBED", "/tmp/superpod-testbed"))
DEADLINE_S = 300


class Testbed:
    """The cluster, its faults, and its Slurm."""

    __test__ = False

    def __call__(self, *words: str) -> str:
        """Run a command of testbed.sh."""
        return run([str(SCRIPT), *words])

    def slurm(self, *words: str, check: bool = True) -> str:
        """Run a command of Slurm."""
        return run(list(words), check=check)

    def state(self, job: str) -> str:
        """Query a job's state from the controller: PENDING, RUNNING, COMPLETED, ..."""
        fields = self.slurm("scontrol", "show", "job", "-o", job, check=False)
        return fields.partition("JobState=")[2].partition(" ")[0]

    def until_ended(self, job: str, limit_s: float = DEADLINE_S) -> str:
        """Wait until a job ends; return its last state."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "")
        until(lambda: self.state(job) in ended, limit_s, lambda: f"job {job} is {self.state(job)}")
        return self.state(job)

    def reset(self) -> None:
        """Empty the queue, and make every node up, connected, fast and idle."""
        run(["scancel", "-u", "root"], check=False)
        for node in range(1, 5):
            for verb in ("join", "fast", "unhang", "boot"):
                run([str(SCRIPT), verb, str(node)], check=False)
        run([str(SCRIPT), "dbd-start"])
        run([str(SCRIPT), "ctld-start"])
        until(lambda: not self.slurm("squeue", "-h", check=False).strip(), 120, lambda: self.slurm("squeue"))
        run(["scontrol", "update", "nodename=node[1-4]", "state=resume"], check=False)
        until(lambda: self.slurm("sinfo", "-h", "-p", "batch", "-t", "idle", "-o", "%D").strip() == "4", 120)

    def processes(self, text: str) -> list[str]:
        """List the processes on all nodes with `text` in their command line."""
        processes = run(["ps", "-eo", "pid,stat,args", "-ww"]).splitlines()
        return [line for line in processes if text in line and " Z" not in line and "ps -eo" not in line]


def run(words: list[str], check: bool = True) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=180)
    if check and done.returncode:
        raise AssertionError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr or done.stdout}")
    return done.stdout


def until(true: Callable[[], object], limit_s: float = 60, otherwise: Callable[[], object] = lambda: "") -> None:
    """Poll until `true()`; an AssertionError with `otherwise()` after `limit_s`."""
    end = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > end:
            raise AssertionError(f"not within {limit_s:.0f} s: {otherwise()}")
        time.sleep(0.3 if limit_s < 300 else 1)


def write_profile(path: Path, runs: Path, *changes: tuple[str, str]) -> Path:
    """Write the testbed's profile with another folder for runs and further text replacements."""
    text = (profiles.DEFAULT_PROFILES / "testbed.toml").read_text()
    for old, new in (("/tmp/superpod-testbed/runs", str(runs)), *changes):
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text)
    return path
