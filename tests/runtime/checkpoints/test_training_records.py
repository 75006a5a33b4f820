"""A run that has trained never starts at step 1 by itself once its checkpoints are gone (issue 25, A4)."""

import shutil
from collections.abc import Callable

import pytest
import typer

from superpod.cli.data import ckpt
from superpod.common.json_files import append_line, write_json
from superpod.errors import UserError
from superpod.runtime.checkpoints import resume, training_records
from superpod.runtime.runs.run_folder import Attempt, RunFolder
from tests.reports.runs import checkpoint_files as made
from tests.runtime.checkpoints.test_resume import attempt_of, saved


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs", "tiny", facts={"save_every": 10}, recipe_lines=["a = 1"])


def trained(run: RunFolder, first: int, last: int) -> Attempt:
    """An attempt that was decided and made these steps; it was killed, so it recorded no end."""
    _, _ = attempt_of(run)
    attempt = run.attempts[-1]
    for step in range(first, last + 1):
        append_line(run.path / "metrics.jsonl", {"t": 1.0, "attempt": attempt.name, "step": step, "loss": 2.0})
        append_line(attempt.path / "heartbeat" / "0.jsonl", {"t": 1.0, "step": step, "phase": "train"})
    return attempt


def without_checkpoints(run: RunFolder) -> None:
    """What a purge of old files, or `rm`, leaves."""
    shutil.rmtree(run.checkpoints)
    run.checkpoints.mkdir()
    (run.path / resume.SAVED).unlink(missing_ok=True)


def without_attempts(run: RunFolder) -> None:
    shutil.rmtree(run.path / "attempts")
    (run.path / "attempts").mkdir()


def without_metrics(run: RunFolder) -> None:
    (run.path / "metrics.jsonl").unlink()


def without_heartbeats(run: RunFolder) -> None:
    for attempt in run.attempts:
        shutil.rmtree(attempt.path / "heartbeat")


def with_ended(run: RunFolder) -> None:
    run.attempts[-1].finish("failed", last_step=52, checkpoint=50)


KEPT: dict[str, list[Callable[[RunFolder], None]]] = {
    "everything else": [],
    "metrics.jsonl": [without_attempts],
    "heartbeat": [without_metrics],
    "result.json": [with_ended, without_metrics, without_heartbeats],
    "metrics.jsonl and a result": [with_ended, without_heartbeats],
}


@pytest.mark.parametrize("kept", KEPT)
def test_a_run_whose_checkpoints_are_gone_stops(kept, run):
    """It started at step 1 without a word, where only metrics.jsonl still showed 52 steps."""
    trained(run, 1, 52)
    saved(run, (40, 50))
    without_checkpoints(run)
    for remove in KEPT[kept]:
        remove(run)
    names = sorted(str(path) for path in run.path.rglob("*"))
    with pytest.raises(resume.NoIntactCheckpointError) as refused:
        resume.decide(run)
    assert "step 5" in str(refused.value), str(refused.value)
    assert f"recipes ckpt reset {run.path}" in (refused.value.hint or "")
    assert sorted(str(path) for path in run.path.rglob("*")) == names
    with pytest.raises(resume.NoIntactCheckpointError):
        resume.decide_by_sizes(run)  # as `submit --resume` asks


def test_steps_before_the_first_save_are_made_again(run):
    """A node that fails there has cost no checkpoint: the chain continues by itself."""
    trained(run, 1, 9)
    assert attempt_of(run)[0].checkpoint is None


def test_a_first_save_that_was_killed_is_no_reason_to_stop_and_neither_is_the_attempt_after_it(run):
    trained(run, 1, 13)
    unfinished = made.write(run.checkpoints / "step=9-last")
    (unfinished / "weights" / "metadata.json").unlink()
    unfinished.with_name("step=9-last-unfinished").touch()
    trained(run, 1, 4)
    assert not list(run.checkpoints.iterdir()), "removed when the second attempt was decided"
    assert attempt_of(run)[0].checkpoint is None


def test_steps_up_to_the_first_save_without_a_trace_of_it_stop_the_run(run):
    trained(run, 1, 13)
    with pytest.raises(resume.NoIntactCheckpointError, match="training up to step 13"):
        resume.decide(run)


def test_without_a_known_interval_any_step_stops_the_run(run):
    trained(run, 1, 3)
    write_json(run.path / "run.json", {name: value for name, value in run.facts.items() if name != "save_every"})
    with pytest.raises(resume.NoIntactCheckpointError, match="training up to step 3"):
        resume.decide(run)


def test_a_save_before_a_stop_counts_however_early(run):
    attempt = trained(run, 1, 4)
    facts = {"t": 1.0, "step": 4, "phase": "stopped", "checkpoint": True}
    append_line(attempt.path / "heartbeat" / "0.jsonl", facts)
    with pytest.raises(resume.NoIntactCheckpointError, match="attempts/001/heartbeat"):
        resume.decide(run)


def test_a_user_lets_it_start_over_and_nothing_is_deleted(run, capsys):
    trained(run, 1, 52)
    saved(run, (40, 50))
    shutil.rmtree(run.checkpoints / "step=49-consumed_samples=400.0")
    shutil.rmtree(run.checkpoints / "step=39-consumed_samples=320.0" / "weights")
    with pytest.raises(resume.NoIntactCheckpointError):
        resume.decide(run)
    ckpt.reset(run.path)
    printed = capsys.readouterr().out
    assert f"kept   {run.path}/metrics-until-001.jsonl" in printed
    assert "starts at step 1" in printed
    assert (run.path / "checkpoints-until-001" / "step=39-consumed_samples=320.0").is_dir()
    assert (run.path / "saved-until-001.jsonl").is_file()
    assert attempt_of(run)[0].checkpoint is None
    trained(run, 1, 52)
    with pytest.raises(resume.NoIntactCheckpointError):
        resume.decide(run)  # the reset was for that time only
    training_records.reset(run)
    assert attempt_of(run)[0].checkpoint is None


def test_what_cannot_be_reset(run):
    (run.path / "done").write_text("{}")
    with pytest.raises(UserError, match="is done"):
        ckpt.reset(run.path)
    (run.path / "done").unlink()
    with run.lock(), pytest.raises(UserError, match="is in use"):
        ckpt.reset(run.path)
    with pytest.raises((UserError, typer.BadParameter)):
        ckpt.reset(run.path / "attempts")
