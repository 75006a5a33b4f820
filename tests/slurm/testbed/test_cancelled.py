"""A job is cancelled long before its successor starts, so that the controller has forgotten it."""

import re
import time

import pytest

from superpod.diagnosis import job_end
from superpod.runtime.runs import run_state
from superpod.slurm.submission import connection, submit
from tests.slurm.testbed.bed import BASE, until
from tests.slurm.testbed.toys import ToyRun

pytestmark = pytest.mark.long


@pytest.fixture
def forgetful(testbed):
    """The testbed, whose controller forgets a job two seconds after its end."""
    conf = BASE / "etc" / "slurm.conf"
    text = conf.read_text()
    conf.write_text(re.sub(r"MinJobAge=\d+", "MinJobAge=2", text))
    testbed.slurm("scontrol", "reconfigure")
    yield testbed
    conf.write_text(text)
    testbed.slurm("scontrol", "reconfigure")


def test_cancelled_run_ends_after_controller_forgot_it(forgetful, profile):
    toy = ToyRun(forgetful, profile(), attempts=1, max_steps=10000)
    toy.until_step(5)
    cancelled = toy.job
    (behind,) = submit.queue(connection.Connection(), str(toy.run.path), 1).ids
    forgetful.slurm("scontrol", "hold", behind)
    forgetful.slurm("scancel", cancelled)
    until(lambda: not forgetful.state(cancelled), 180, lambda: forgetful.state(cancelled))
    assert toy.run.stop is not None, "the attempt left the mark while it still lived"
    (toy.run.path / run_state.STOP).unlink()  # as if it had been killed before
    assert job_end.current_state(cancelled, toy.run.output(cancelled)).startswith("CANCELLED"), "accounting knows"
    forgetful.slurm("scontrol", "release", behind)
    toy.until_gone(120)
    assert len(toy.run.attempts) == 1, toy.story()
    assert toy.seen().state == "cancelled"
    assert "was cancelled by the user" in toy.run.output(behind).read_text()


def test_cancelled_run_without_accounting(forgetful, profile):
    """Slurm's messages in the output of the job remain."""
    toy = ToyRun(forgetful, profile(), attempts=1, max_steps=10000)
    toy.until_step(5)
    forgetful.slurm("scancel", toy.job)
    until(lambda: not forgetful.state(toy.job), 180)
    assert toy.run.attempts[0].result["state"] == "cancelled"
    forgetful("dbd-stop")
    try:
        assert job_end.current_state(toy.job, toy.run.output(toy.job)) == "CANCELLED"
    finally:
        forgetful("dbd-start")


def test_a_requeued_job_is_not_cancelled(testbed, profile):
    toy = ToyRun(testbed, profile(), attempts=1, max_steps=60)
    toy.until_step(15)
    testbed.slurm("scontrol", "requeue", toy.job)
    time.sleep(3)
    assert toy.run.stop is None
    toy.until_done()
    toy.check_whole()
