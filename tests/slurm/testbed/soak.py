"""Random faults, one after the other, on one run; it ends as if nothing had happened. `make soak`.

Between two faults the run makes a new checkpoint, so that what is tried is each fault and not the bound on retries.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.slurm.testbed import bed as shell
from tests.slurm.testbed.bed import BASE, SCRIPT, Testbed, until, write_profile
from tests.slurm.testbed.nemo_runs import LONGEST, Nemo, NemoRun
from tests.slurm.testbed.runs import BedRun
from tests.slurm.testbed.toys import ToyRun


def kill_rank(bed: Testbed, draw: random.Random, run: BedRun) -> str:
    """kill -9 of any rank."""
    ranks = run.ranks()
    if not ranks:
        return "no rank to kill"
    os.kill(draw.choice(ranks), signal.SIGKILL)
    return "kill -9 of a rank"


def stop_rank(bed: Testbed, draw: random.Random, run: BedRun) -> str:
    """A rank that hangs for ever."""
    ranks = run.ranks()
    if not ranks:
        return "no rank to stop"
    os.kill(draw.choice(ranks), signal.SIGSTOP)
    return "a rank hangs"


def crash(bed: Testbed, draw: random.Random, run: BedRun) -> str:
    """A node loses power and comes back."""
    node = str(draw.randint(1, 4))
    bed("crash", node)
    time.sleep(draw.uniform(1, 20))
    bed("boot", node)
    return f"node{node} loses power"


def cut(bed: Testbed, draw: random.Random, run: BedRun) -> str:
    """A cable is pulled and put back."""
    node = str(draw.randint(1, 4))
    bed("cut", node)
    time.sleep(draw.uniform(15, 40))
    bed("join", node)
    return f"the cable of node{node} is pulled"


def slurmd(bed: Testbed, draw: random.Random, run: BedRun) -> str:
    """kill -9 of slurmd."""
    node = str(draw.randint(1, 4))
    bed("slurmd-kill", node)
    time.sleep(draw.uniform(1, 15))
    bed("boot", node)
    return f"kill -9 of slurmd on node{node}"


def controller(bed: Testbed, draw: random.Random, run: BedRun) -> str:
    """slurmctld is restarted."""
    bed("ctld-stop")
    time.sleep(draw.uniform(1, 10))
    bed("ctld-start")
    return "slurmctld is restarted"


def accounting(bed: Testbed, draw: random.Random, run: BedRun) -> str:
    """slurmdbd is gone for a while."""
    bed("dbd-stop")
    time.sleep(draw.uniform(5, 30))
    bed("dbd-start")
    return "slurmdbd is gone for a while"


def preempt(bed: Testbed, draw: random.Random, run: BedRun) -> str:
    """A job of a higher partition takes the nodes."""
    shell.run(["sbatch", "-p", "batch", "-N4", "--gpus-per-node=8", "-o", "/dev/null", "--wrap", "sleep 3"])
    return "preempted"


def requeue(bed: Testbed, draw: random.Random, run: BedRun) -> str:
    """An administrator requeues the job."""
    jobs = shell.run(["squeue", "-h", "-t", "R", "-p", "low", "-o", "%i"]).split()
    shell.run(["scontrol", "requeue", *jobs[:1]], check=False)
    return "requeued by an administrator"


FAULTS = (kill_rank, stop_rank, crash, cut, slurmd, controller, accounting, preempt, requeue)


@dataclass(frozen=True)
class Soaked:
    """What twenty faults have done to a run."""

    run: BedRun
    faults: list[str]

    def __str__(self) -> str:
        lost = self.run.lost()
        counts = ", ".join(f"{count} x {fault}" for fault, count in Counter(self.faults).most_common())
        return (
            f"{len(self.faults)} faults ({counts}): {len(self.run.run.attempts)} attempts, {self.run.max_steps} steps, "
            f"all there with the losses of an undisturbed run; {max(lost, default=0)} steps repeated at most "
            f"(checkpoints every {self.run.save_every}), {sum(lost)} in all; no process and no job is left"
        )


def soak(bed: Testbed, faults: int, seed: int, folder: Path, nemo: Nemo | None = None, say=print) -> Soaked:
    """Run it; raises AssertionError when a step is lost, repeated too often, or something is left behind."""
    draw = random.Random(seed)
    low = ('partition = "batch"', 'partition = "low"')
    # NeMo takes a minute to start, and the next fault comes after 10 s: a share of its time that the bound would end.
    bounds = ("stalled_s = 30", f"stalled_s = {30 if nemo else 15}\nidle_attempts = {50 if nemo else 2}")
    profile = write_profile(folder / "soak.toml", folder / "runs", low, bounds)
    if nemo:
        run = NemoRun(nemo, profile, attempts=8, max_steps=LONGEST)
    else:
        run = ToyRun(bed, profile, attempts=8, max_steps=LONGEST, step_s=0.15)
    happened = []
    for number in range(1, faults + 1):
        run.until_new_checkpoint(300)
        assert not run.run.done, "it was too quick for so many faults"
        step = run.step
        happened.append(draw.choice(FAULTS)(bed, draw, run))
        say(
            f"{number:3} {time.strftime('%H:%M:%S')} step {step:5} attempt {len(run.run.attempts):3}  {happened[-1]}",
            flush=True,
        )
        jobs = run.seen().jobs
        if jobs is not None and len(jobs) < 4:  # None: the controller is down
            run.queue(4 - len(jobs))
    run.until_new_checkpoint(300)
    run.end_at(run.step + 60)
    shell.run(["scancel", "--signal=USR1", run.job], check=False)  # save, and let the next job go on
    until(lambda: run.seen().state != "running", 60)
    run.until_done(400)
    run.check_whole()
    assert run.left_behind() == []
    assert run.seen().jobs == []
    return Soaked(run, happened)


def _recipes(*words: object, timeout: float = 400) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "superpod.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--faults", type=int, default=20)
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options.add_argument("--training", choices=("nemo", "toy"), default="nemo")
    given = options.parse_args()
    print(f"{given.faults} faults, seed {given.seed}, {given.training}", flush=True)
    os.environ["SLURM_CONF"] = str(BASE / "etc" / "slurm.conf")
    shell.run([str(SCRIPT), "up"])
    testbed = Testbed()
    testbed.all_well()
    began = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="superpod-soak-"))  # stays after a failure
    print(f"in {scratch}", flush=True)
    real = Nemo(testbed, scratch, _recipes) if given.training == "nemo" else None
    soaked = soak(testbed, given.faults, given.seed, scratch, real)
    print(f"seed {given.seed}, {given.training}: {soaked}; {time.monotonic() - began:.0f} s")
    shutil.rmtree(scratch)
    testbed.all_well()
