"""Damage between two jobs of a run on a real Slurm, with the toy and with real NeMo.

With --update-goldens, what the runs did goes into docs/slurm.md.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

import superpod.planner
from superpod.runtime.attempts import guard
from superpod.runtime.checkpoints import checkpoint_folder, resume
from superpod.runtime.runs import run_state
from superpod.slurm.status import run_views
from tests.slurm.testbed.bed import until
from tests.slurm.testbed.runs import BedRun
from tests.slurm.testbed.test_container import boxed
from tests.slurm.testbed.trainings import Training

pytestmark = pytest.mark.long

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


FAULTS = {
    truncated: "a file of it is cut short",
    empty: "a file of it is empty",
    one_flipped_bit: "one bit of it is flipped",
    deleted: "it is deleted",
    unreadable: "a file of it cannot be read",
    half: "half of it was written",
}


def newest_first(run: BedRun) -> list[Path]:
    return checkpoint_folder.candidates(run.run.checkpoints)


def saved_steps(run: BedRun) -> list[int]:
    return [checkpoint_folder.step_of(folder.name) or 0 for folder in newest_first(run)]


def is_summed(run: BedRun, step: int, parts: int) -> bool:
    """Whether every node has written the checksums of its files of a step."""
    newest = newest_first(run)
    return bool(newest) and saved_steps(run)[0] >= step and len(list((newest[0] / "manifest").glob("*.json"))) == parts


def stopped_after_three(training: Training, where: Path | None = None) -> BedRun:
    """A run with three complete checkpoints, 10 steps apart, whose only job was killed."""
    run = training.start(where=where, attempts=1, steps=60, step_s=0.1)
    until(lambda: is_summed(run, 30, 2 if training.nemo else 1), 120 * run.patience, run.story)
    for pid in run.ranks():
        os.kill(pid, signal.SIGKILL)
    until(lambda: run.run.attempts[0].result.get("ended"), 60, run.story)
    run.until_gone()
    saved = saved_steps(run)
    assert saved == [saved[0], saved[0] - 10, saved[0] - 20], run.story()
    return run


def goes_on(training: Training, run: BedRun, from_step: int, newest: int, fault: str) -> None:
    """The next job resumes from there and reports the lost steps; the run's losses equal an undisturbed run's."""
    lost = newest - from_step
    run.queue(1)
    training.ends_well(run, fault, most_lost=run.save_every + run.in_flight + lost)
    result = run.run.attempts[1].resume
    assert (result["step"], result["lost_steps"]) == (from_step, lost), run.story()
    assert (f"{lost} steps are lost" in result["words"]) == bool(lost)
    assert result["words"] in next(run.run.path.glob(f"slurm-{run.job}.out")).read_text()


@pytest.mark.parametrize("damage", FAULTS)
def test_damaged_latest_checkpoint_costs_one_interval(damage, training, recipes_cli):
    run = stopped_after_three(training)
    newest, second, _ = saved_steps(run)
    folder = newest_first(run)[0]
    damage(folder)
    goes_on(training, run, second, newest, f"the newest checkpoint: {FAULTS[damage]}")
    aside = run.run.path / resume.DAMAGED / folder.name
    assert aside.is_dir() == (damage is not deleted), "set aside, not deleted"
    history = json.loads(recipes_cli("history", run.run.path, "--json").stdout)
    assert "10 steps are lost" in history[1]["notes"][0]


@pytest.mark.parametrize("has_manifest", [True, False])
def test_shard_of_another_save_is_rejected(has_manifest, training):
    """A shard of step 50 in the folder of step 52 was, where that had no manifest.

    Its name must not hold the word that NeMo monitors: `nemo_topk_check_previous_run` (2.7.3) looks for it in the path.
    """
    run = stopped_after_three(training)
    newest, second, _ = saved_steps(run)
    folder, older, _ = newest_first(run)
    if not has_manifest:
        if not training.nemo:
            pytest.skip("the toy's checkpoints have neither torch's table nor Lightning's step")
        shutil.rmtree(folder / "manifest")
    shutil.copy2(older / FILE, folder / FILE)
    goes_on(training, run, second, newest, "a shard of the step before lies in the newest checkpoint")
    assert (run.run.path / resume.DAMAGED / folder.name).is_dir()
    assert "verified)" in run.run.attempts[1].resume["words"]


def test_damaged_previous_checkpoint_costs_nothing(training):
    run = stopped_after_three(training)
    newest = saved_steps(run)[0]
    one_flipped_bit(newest_first(run)[1])
    goes_on(training, run, newest, newest, "the second newest checkpoint: one bit of it is flipped")


def test_two_damaged_checkpoints_cost_two_intervals(training):
    run = stopped_after_three(training)
    newest, _, third = saved_steps(run)
    one_flipped_bit(newest_first(run)[0])
    (newest_first(run)[1] / FILE).unlink()
    goes_on(training, run, third, newest, "the newest: one bit is flipped; the second newest: a file is missing")


@pytest.mark.parametrize("damage", [one_flipped_bit, deleted])
def test_run_without_intact_checkpoint_stops(damage, training):
    """It began at step 1 without a word, or burnt every job of the chain on it."""
    run = stopped_after_three(training)
    for folder in newest_first(run):
        damage(folder)
    before = len(run.run.metrics())
    run.queue(3)
    until(lambda: not run.seen().jobs, 200, run.story)  # a second look at each takes 30 s
    assert [attempt.result["state"] for attempt in run.run.attempts[1:]] == ["failed"], run.story()
    assert len(run.run.metrics()) == before, "no step was made"
    marker = run.run.stop
    assert marker is not None, run.story()
    assert "cannot be resumed" in marker.reason
    assert "start a new run" in marker.reason
    seen: run_views.RunView = run.seen()
    assert seen.state == "failed"
    assert "cannot be resumed" in seen.message
    assert run.left_behind() == []
    training.note(run, f"every checkpoint: {FAULTS[damage]}")


def test_run_with_metrics_only_stops_until_restarted(training, recipes_cli):
    """With the checkpoints and saved.jsonl gone, it started at step 1 without a word."""
    run = stopped_after_three(training)
    shutil.rmtree(run.run.checkpoints)
    run.run.checkpoints.mkdir()
    (run.run.path / resume.SAVED).unlink()
    result = run.run.attempts[0].path / "result.json"
    kept = json.loads(result.read_text())
    result.write_text(json.dumps({name: kept[name] for name in ("state", "started", "ended", "job", "message")}))
    before = len(run.run.metrics())
    run.queue(2)
    until(lambda: not run.seen().jobs, 200, run.story)
    marker = run.run.stop
    assert marker is not None, run.story()
    assert f"records training up to step {before}" in marker.reason
    assert len(run.run.metrics()) == before, "no step was made"
    done = recipes_cli("ckpt", "reset", run.run.path)
    assert done.returncode == 0, done.stderr
    guard.allow_resume(run.run)
    run.queue(1)
    training.ends_well(run, "every checkpoint is deleted, and the user lets the run start over", least_attempts=3)


@pytest.mark.parametrize("damage", [one_flipped_bit, truncated])
def test_in_a_container(damage, training, boxed):
    """The decision is made outside the container, and the ranks in it find the same checkpoint."""
    mounts, inside = [Path(__file__).parents[2]], {}
    if training.nemo:
        project = Path(superpod.planner.__file__).resolve().parents[1]
        mounts = sorted({project, Path(sys.prefix), Path(sys.base_prefix), training.nemo.data})
        inside = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    run = stopped_after_three(training, boxed(*mounts, **inside))
    newest, second, _ = saved_steps(run)
    damage(newest_first(run)[0])
    goes_on(training, run, second, newest, f"in a container, the newest checkpoint: {FAULTS[damage]}")


def torn(file: Path) -> None:
    """As a machine leaves it that lost power while it wrote."""
    data = file.read_bytes()
    file.write_bytes(data[: len(data) * 2 // 3] + bytes(16))


def test_damaged_small_files_cost_nothing(training):
    """Each small file of the run is truncated: results, metrics, records of saves, heartbeats, jobs."""
    run = stopped_after_three(training)
    newest = saved_steps(run)[0]
    first = run.run.attempts[0].path
    for file in (first / "result.json", first / "env.json", first / "deadline.json", *(first / "heartbeat").iterdir()):
        torn(file)
    torn(run.run.path / run_state.CHAIN)
    with (run.run.path / resume.SAVED).open("a") as notes:
        notes.write('{"t": 1795391302.05, "saved": "st')
    with (run.run.path / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"t": 1795391302.05, "attem')
    goes_on(training, run, newest, newest, "small files of the run are torn")
