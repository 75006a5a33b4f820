"""Random faults, one after the other, on one run; it ends as if nothing had happened. `make soak`.

Between two faults the run makes a new checkpoint, so that what is tried is each fault and not the bound on retries.
"""

import argparse
import os
import random
import signal
import tempfile
import time
from pathlib import Path

from superpod.slurm import profiles
from tests.slurm.testbed.conftest import BASE, SCRIPT, Testbed, run, until
from tests.slurm.testbed.toys import ToyRun


def kill_rank(bed: Testbed, draw: random.Random, toy: ToyRun) -> str:
    """kill -9 of any rank."""
    ranks = toy.ranks()
    if not ranks:
        return "no rank to kill"
    os.kill(draw.choice(ranks), signal.SIGKILL)
    return "kill -9 of a rank"


def stop_rank(bed: Testbed, draw: random.Random, toy: ToyRun) -> str:
    """A rank that hangs for ever."""
    ranks = toy.ranks()
    if not ranks:
        return "no rank to stop"
    os.kill(draw.choice(ranks), signal.SIGSTOP)
    return "a rank hangs"


def crash(bed: Testbed, draw: random.Random, toy: ToyRun) -> str:
    """A node loses power and comes back."""
    node = str(draw.randint(1, 4))
    bed("crash", node)
    time.sleep(draw.uniform(1, 20))
    bed("boot", node)
    return f"node{node} loses power"


def cut(bed: Testbed, draw: random.Random, toy: ToyRun) -> str:
    """A cable is pulled and put back."""
    node = str(draw.randint(1, 4))
    bed("cut", node)
    time.sleep(draw.uniform(15, 40))
    bed("join", node)
    return f"the cable of node{node} is pulled"


def slurmd(bed: Testbed, draw: random.Random, toy: ToyRun) -> str:
    """kill -9 of slurmd."""
    node = str(draw.randint(1, 4))
    bed("slurmd-kill", node)
    time.sleep(draw.uniform(1, 15))
    bed("boot", node)
    return f"kill -9 of slurmd on node{node}"


def controller(bed: Testbed, draw: random.Random, toy: ToyRun) -> str:
    """slurmctld is restarted."""
    bed("ctld-stop")
    time.sleep(draw.uniform(1, 10))
    bed("ctld-start")
    return "slurmctld is restarted"


def accounting(bed: Testbed, draw: random.Random, toy: ToyRun) -> str:
    """slurmdbd is gone for a while."""
    bed("dbd-stop")
    time.sleep(draw.uniform(5, 30))
    bed("dbd-start")
    return "slurmdbd is gone for a while"


def preempt(bed: Testbed, draw: random.Random, toy: ToyRun) -> str:
    """A job of a higher partition takes the nodes."""
    run(["sbatch", "-p", "batch", "-N4", "--gpus-per-node=8", "-o", "/dev/null", "--wrap", "sleep 3"])
    return "preempted"


def requeue(bed: Testbed, draw: random.Random, toy: ToyRun) -> str:
    """An administrator requeues the job."""
    jobs = run(["squeue", "-h", "-t", "R", "-p", "low", "-o", "%i"]).split()
    run(["scontrol", "requeue", *jobs[:1]], check=False)
    return "requeued by an administrator"


FAULTS = (kill_rank, stop_rank, crash, cut, slurmd, controller, accounting, preempt, requeue)


def soak(bed: Testbed, faults: int, seed: int, folder: Path, say=print) -> ToyRun:
    """Run it; raises AssertionError when a step is lost, repeated too often, or something is left behind."""
    draw = random.Random(seed)
    text = (profiles.SHIPPED / "testbed.toml").read_text().replace("/tmp/superpod-testbed/runs", str(folder / "runs"))
    text = text.replace('partition = "batch"', 'partition = "low"').replace("stalled_s = 30", "stalled_s = 15")
    profile = folder / "soak.toml"
    profile.write_text(text)
    toy = ToyRun(bed, profile, nodes=2, attempts=8, max_steps=10**6, save_every=10, step_s=0.15)
    for number in range(1, faults + 1):
        toy.until_new_checkpoint(300)
        step, fault = toy.step, draw.choice(FAULTS)(bed, draw, toy)
        say(
            f"{number:3} {time.strftime('%H:%M:%S')} step {step:5} attempt {len(toy.run.attempts):3}  {fault}",
            flush=True,
        )
        jobs = toy.seen().jobs
        if jobs is not None and len(jobs) < 4:  # None: the controller is down
            toy.queue(4 - len(jobs))
    toy.until_new_checkpoint(300)
    _let_it_end(toy)
    toy.until_done(400)
    toy.options["max_steps"] = toy.step
    toy.check_whole()
    assert toy.left_behind() == []
    return toy


def _let_it_end(toy: ToyRun) -> None:
    """From the next attempt on, the run is a little longer than it is now."""
    recipe = toy.run.path / "code" / "recipe.py"
    recipe.write_text(recipe.read_text().replace(str(10**6), str(toy.step + 60)))
    run(["scontrol", "requeue", toy.job], check=False)
    until(lambda: toy.seen().state != "running", 60)


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--faults", type=int, default=20)
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    os.environ["SLURM_CONF"] = str(BASE / "etc" / "slurm.conf")
    run([str(SCRIPT), "up"])
    testbed = Testbed()
    testbed.all_well()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="superpod-soak-") as scratch:
        done = soak(testbed, given.faults, given.seed, Path(scratch))
        attempts, lost = len(done.run.attempts), done.lost()
    testbed.all_well()
    print(
        f"{given.faults} faults, seed {given.seed}: {attempts} attempts, {done.options['max_steps']} steps, "
        "all there with"
    )
    print(f"the losses of an uninterrupted run; {max(lost)} steps repeated at most; {time.monotonic() - began:.0f} s")
