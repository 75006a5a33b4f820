"""Issue 14, findings 1 and 6: damaged checkpoints between two jobs of a run, on a real Slurm, with the toy training."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from superpod.node import checkpoints, guard, resume
from superpod.slurm import watch
from tests.slurm.testbed.conftest import until
from tests.slurm.testbed.test_container import boxed
from tests.slurm.testbed.toys import ToyRun

assert boxed  # a fixture
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
    assert len(toy.run.attempts) == 1, toy.story()
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
