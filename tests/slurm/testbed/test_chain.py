"""Chains of attempts: time limits, cancellation, failures. Toy ranks, real everything else."""

import time

import pytest

from superpod.runtime.attempts import guard
from superpod.runtime.runs import run_state
from tests.slurm.testbed.bed import until
from tests.slurm.testbed.toys import ToyRun

pytestmark = pytest.mark.long


def test_a_run_in_one_attempt(testbed, profile):
    toy = ToyRun(testbed, profile(), max_steps=30, step_s=0.05)
    toy.until_done()
    toy.check_whole()
    until(lambda: testbed.slurm("sacct", "-X", "-n", "-j", toy.job, "-o", "state").split() == ["COMPLETED"], 30)
    assert len(toy.run.attempts) == 1
    assert toy.left_behind() == []


def test_a_save_of_45_seconds_before_the_limit(testbed, profile):
    """The first attempt knows the duration of a save only from the profile; later the measured one counts."""
    toy = ToyRun(
        testbed,
        profile(("save_s = 20", "save_s = 60")),
        time_limit="2:00",
        attempts=4,  # Slurm may warn up to a minute early (sbatch --signal): three attempts were 1 to 7 steps short
        max_steps=180,
        save_every=1000,
        step_s=0.5,
        save_s=45,
    )
    toy.until_done(600)
    toy.check_whole(most_lost=0)
    assert len(toy.run.attempts) >= 2


def test_a_cancelled_run_stays_cancelled(testbed, profile):
    toy = ToyRun(testbed, profile(), max_steps=10000)
    toy.until_step(15)
    testbed.slurm("scancel", toy.job)
    toy.until_gone(120)
    assert toy.seen().state == "cancelled", toy.story()
    assert len(toy.run.attempts) == 1
    assert toy.left_behind() == []


def test_status_resubmits_nothing_of_a_cancelled_run(testbed, profile, recipes_cli):
    """The last attempt that was queued, cancelled with Slurm's own command: no attempt is left to notice it."""
    toy = ToyRun(testbed, profile(), attempts=1, max_steps=10000)
    toy.until_step(5)
    testbed.slurm("scancel", toy.job)
    until(lambda: testbed.state(toy.job) == "CANCELLED", 60)
    status = recipes_cli("status", toy.run.path)
    assert "cancelled" in status.stdout
    assert "queued" not in status.stdout
    assert toy.seen().jobs == []


def test_recipes_cancel_ends_everything(testbed, profile, recipes_cli):
    toy = ToyRun(testbed, profile(), max_steps=10000)
    toy.until_step(5)
    done = recipes_cli("cancel", toy.run.path)
    assert done.returncode == 0, done.stderr
    toy.until_gone()
    assert toy.seen().state == "cancelled"
    status = recipes_cli("status", toy.run.path)
    assert "cancelled" in status.stdout
    assert not toy.seen().jobs
    assert toy.left_behind() == []


def test_recipe_crashing_at_step_0_stops_after_the_bound(testbed, profile):
    toy = ToyRun(testbed, profile(), attempts=5, crash_at=0)
    toy.until_gone(180)
    seen = toy.seen()
    assert seen.state == "failed"
    assert len(toy.run.attempts) == 2
    assert "2 consecutive attempts wrote no new checkpoint" in seen.message
    assert "ValueError: planted: the recipe is wrong" in seen.message
    assert [attempt.result["state"] for attempt in toy.run.attempts] == ["failed", "failed"]
    until(lambda: testbed.slurm("sacct", "-X", "-n", "-j", toy.job, "-o", "state").split() == ["FAILED"], 30)


def test_two_attempts_never_run_on_one_folder(testbed, profile):
    """Even if the user also submits the script by hand, with another name and without singleton."""
    toy = ToyRun(testbed, profile(), attempts=1, nodes=1, max_steps=150)
    toy.until_step(5)
    beside = testbed.slurm(
        *("env", f"SUPERPOD_RUN_DIR={toy.run.path}", "sbatch", "--parsable", "--job-name=other", "-o"),
        *(f"{toy.run.path}/beside.out", f"{toy.run.path}/job.sbatch"),
    ).strip()
    assert testbed.until_ended(beside, 180) == "FAILED" or toy.run.done
    assert "is in use by" in (toy.run.path / "beside.out").read_text() or toy.run.done
    toy.until_done()
    toy.check_whole()


def test_cancelled_run_resumes_on_request(testbed, profile, recipes_cli):
    where = profile()
    toy = ToyRun(testbed, where, attempts=2, max_steps=60)
    toy.until_new_checkpoint()
    recipes_cli("cancel", toy.run.path)
    toy.until_gone()
    done = recipes_cli("submit", "toy", "--cluster", where, "--resume", toy.run.path)
    assert done.returncode == 0, done.stderr
    assert "resumes from step" in done.stdout
    toy.until_done()
    toy.check_whole()
    refused = recipes_cli("submit", "toy", "--cluster", where, "--resume", toy.run.path)
    assert refused.returncode == 2
    assert "is done" in refused.stderr


def test_job_with_self_submit_queues_the_next_attempt(testbed, profile):
    """Only with chain.self_submit: two jobs are queued by the run itself."""
    where = profile(("[health]", "self_submit = true\n\n[health]"))
    toy = ToyRun(testbed, where, attempts=1, max_steps=60)
    for attempt in (1, 2):
        until(lambda attempt=attempt: len(toy.run.attempts) == attempt and toy.step >= 15 * attempt, 120, toy.story)
        testbed.slurm("scancel", "--signal=USR1", f"{toy.job}.0")
    toy.until_done()
    toy.check_whole(most_lost=0)
    assert len({attempt.result["job"] for attempt in toy.run.attempts}) == 3


def test_superfluous_attempts_end_immediately(testbed, profile):
    toy = ToyRun(testbed, profile(), attempts=1, max_steps=20, step_s=0.05)
    toy.until_done()
    toy.queue(1)
    toy.until_gone()
    assert len(toy.run.attempts) == 1


def test_stopped_run_reports_reason_and_stays_stopped(testbed, profile):
    toy = ToyRun(testbed, profile(), attempts=1, max_steps=10)
    guard.stop(toy.run, "planted", by=run_state.StoppedBy.AUTOMATIC)
    toy.until_gone()
    time.sleep(1)
    assert toy.seen().state in ("failed", "done")


@pytest.mark.parametrize("value", ["it's; touch pwned $(touch pwned)", 'né ☃ "x" `touch pwned`', "100% # of it"])
def test_hostile_folders_on_a_real_slurm(value, testbed, profile, tmp_path):
    where = tmp_path / value
    where.mkdir()
    inside = profile().read_text().replace(str(tmp_path / "runs"), str(where).replace('"', '\\"'))
    file = tmp_path / "hostile.toml"
    file.write_text(inside + f"\n[env]\nMINE = '''{value}'''\n")
    toy = ToyRun(testbed, file, max_steps=12, step_s=0.02)
    toy.until_done()
    toy.check_whole()
    assert not list(tmp_path.rglob("pwned"))
    assert list(toy.run.path.glob("slurm-*.out"))
