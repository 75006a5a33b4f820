"""Issue 14, findings 1 and 6: damaged checkpoints between two jobs of a run, on a real Slurm, with the toy training."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from superpod.node import checkpoints, guard, resume
from superpod.slurm import watch
from tests.slurm.testbed.conftest import until
from tests.slurm.testbed.test_container import boxed
from tests.slurm.testbed.test_train import QUICK, SMALL, TP1, submitted, text, until_done
from tests.slurm.testbed.toys import ToyRun

pytestmark = pytest.mark.long

assert boxed and text  # fixtures  # noqa: PT018
FILE = "weights/__0_0.distcp"


def truncated(folder: Path) -> None:
    os.truncate(folder / FILE, 1000)


def empty(folder: Path) -> None:
    os.truncate(folder / FILE, 0)


def one_flipped_bit(folder: Path) -> None:
    data = bytearray((folder / FILE).read_bytes())
    data[5000] ^= 1
    (folder / FILE).write_bytes(data)


def deleted(folder: Path) -> None:
    shutil.rmtree(folder)


def unreadable(folder: Path) -> None:
    """For root too: a link that leads to itself."""
    (folder / FILE).unlink()
    (folder / FILE).symlink_to("__0_0.distcp")


def half(folder: Path) -> None:
    (folder / "weights" / "metadata.json").unlink()


def stopped_at_35(testbed, profile: Path) -> ToyRun:
    """A run with checkpoints of steps 10, 20 and 30, whose only job was killed."""
    toy = ToyRun(testbed, profile, attempts=1, max_steps=45, step_s=0.1)
    toy.until_step(35)
    for pid in toy.ranks():
        os.kill(pid, signal.SIGKILL)
    until(lambda: toy.run.attempts[0].result.get("ended"), 60, toy.story)
    toy.until_gone()
    assert [checkpoints.step_of(folder.name) for folder in newest_first(toy)] == [30, 20, 10], toy.story()
    return toy


def newest_first(toy: ToyRun) -> list[Path]:
    return checkpoints.candidates(toy.run.checkpoints)


def goes_on(toy: ToyRun, from_step: int) -> None:
    """The next job resumes from there, says what is lost, and the run's losses are an undisturbed run's."""
    lost = 30 - from_step
    toy.queue(1)
    toy.until_done()
    toy.check_whole(most_lost=40 - from_step)
    result = toy.run.attempts[1].resume
    assert (result["step"], result["lost_steps"]) == (from_step, lost), toy.story()
    assert (f"{lost} steps are lost" in result["words"]) == bool(lost)
    assert result["words"] in next(toy.run.path.glob(f"slurm-{toy.job}.out")).read_text()
    assert toy.left_behind() == []


@pytest.mark.parametrize("damage", [truncated, empty, one_flipped_bit, deleted, unreadable, half])
def test_finding_1_a_damaged_newest_costs_one_interval(damage, testbed, profile):
    toy = stopped_at_35(testbed, profile())
    newest = newest_first(toy)[0]
    damage(newest)
    goes_on(toy, 20)
    assert (toy.run.path / resume.ASIDE / newest.name).is_dir() == (damage is not deleted), "set aside, not deleted"


def test_a_damaged_second_newest_costs_nothing(testbed, profile):
    toy = stopped_at_35(testbed, profile())
    one_flipped_bit(newest_first(toy)[1])
    goes_on(toy, 30)


@pytest.mark.parametrize("damage", [one_flipped_bit, deleted])
def test_finding_1_with_no_whole_one_the_run_stops_and_its_chain_ends(damage, testbed, profile):
    """14: it began at step 1 without a word, or burnt every job of the chain on it."""
    toy = stopped_at_35(testbed, profile())
    for folder in newest_first(toy):
        damage(folder)
    before = len(toy.run.metrics())
    toy.queue(3)
    until(lambda: not toy.seen().jobs, 90, toy.story)
    assert [attempt.result["state"] for attempt in toy.run.attempts[1:]] == ["failed"], toy.story()
    assert len(toy.run.metrics()) == before, "no step was made"
    marker = guard.stopped(toy.run)
    assert marker is not None, toy.story()
    assert "cannot go on" in marker.reason
    assert "start a new run" in marker.reason
    seen: watch.RunView = toy.seen()
    assert seen.state == "failed"
    assert "cannot go on" in seen.message


@pytest.mark.parametrize("damage", [one_flipped_bit, truncated])
def test_finding_1_in_a_container(damage, testbed, boxed):
    """The decision is made outside, and the ranks inside find the same checkpoint."""
    toy = stopped_at_35(testbed, boxed(Path(__file__).parents[2]))
    damage(newest_first(toy)[0])
    goes_on(toy, 20)


@pytest.mark.nemo
@pytest.mark.train
@pytest.mark.long
def test_finding_1_real_nemo_on_two_nodes(testbed, profile, recipes_cli, text):
    """The newest has a flipped bit, the second newest lacks a file: losses are bit for bit an undisturbed run's."""
    words = ("tiny_llama3", "--cluster", profile(), "--nodes", 2, "--data", text, *SMALL, *QUICK, *TP1)
    steps = ("trainer.max_steps=24", "log.ckpt.every_n_train_steps=6", "log.ckpt.save_top_k=9")
    whole = submitted(recipes_cli, *words, *steps)
    until_done(whole)
    broken = submitted(recipes_cli, *words, *steps)
    until(broken.metrics, 600)
    job = broken.attempts[0].result["job"]
    queued = testbed.slurm("squeue", "-h", "-t", "PENDING", "-o", "%i").split()
    testbed.slurm("scontrol", "hold", ",".join(queued))
    until(lambda: len(broken.metrics()) >= 20, 300)
    testbed.slurm("scancel", "--signal=KILL", f"{job}.0")
    testbed.until_ended(job)
    newest, second, third = (folder for folder in checkpoints.candidates(broken.checkpoints))
    for folder in (newest, second, third):
        assert {part.name for part in (folder / "manifest").iterdir()} == {"0.json", "1.json"}, "a part a node"
    data = bytearray((newest / "weights" / "__1_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (newest / "weights" / "__1_0.distcp").write_bytes(data)
    (second / "weights" / "__0_1.distcp").unlink()
    testbed.slurm("scontrol", "release", ",".join(queued))
    until_done(broken)
    result = broken.attempts[1].resume
    assert (result["step"], result["lost_steps"]) == (6, 12), result
    assert [line["loss"] for line in broken.metrics()] == [line["loss"] for line in whole.metrics()]
    assert sorted(p.name for p in (broken.path / resume.ASIDE).iterdir()) == sorted([newest.name, second.name])
    history = json.loads(recipes_cli("history", broken.path, "--json").stdout)
    assert "12 steps are lost" in history[1]["notes"][0]
