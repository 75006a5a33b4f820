"""`--after`: what Slurm would accept and then never start is refused."""

import pytest

from superpod.errors import UserError
from superpod.slurm import dependency
from superpod.slurm.connection import Connection
from superpod.slurm.dependency import Dependency


class FakeSlurm(Connection):
    """Fake: `controller` and `accounting` are what scontrol and sacct print; '' = they know no such job."""

    def __init__(self, controller: str = "", accounting: str = "") -> None:
        self.controller, self.accounting = controller, accounting

    def run(self, words, **_how):
        if words[0] == "scontrol" and not self.controller:
            raise UserError("slurm_load_jobs error: Invalid job id specified")
        return self.controller if words[0] == "scontrol" else self.accounting


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("123", Dependency("123", "afterok")),
        ("123:afterany", Dependency("123", "afterany")),
        ("afterany:123", Dependency("123", "afterany")),
        ("123_4:after", Dependency("123_4", "after")),
    ],
)
def test_a_job_and_a_type(text, means):
    assert dependency.parse(text) == means


@pytest.mark.parametrize("text", ["", "data", "123:afterOK", "123:ok", "12 3", "123;touch pwned", "123:", ":123"])
def test_what_is_no_job_is_refused(text):
    with pytest.raises(UserError, match="--after"):
        dependency.parse(text)


@pytest.mark.parametrize(
    ("slurm", "kind", "waits"),
    [
        (FakeSlurm("JobState=RUNNING"), "afterok", True),
        (FakeSlurm("JobState=PENDING"), "after", True),
        (FakeSlurm("JobState=RUNNING"), "after", False),
        (FakeSlurm("JobState=COMPLETED"), "afterok", False),
        (FakeSlurm("", "COMPLETED\n"), "afterok", False),
        (FakeSlurm("", "CANCELLED by 0\n"), "afterany", False),
        (FakeSlurm("JobId=5 JobState=COMPLETED\nJobId=6 JobState=PENDING\n"), "afterok", True),
        (FakeSlurm("JobState=FAILED"), "afternotok", False),
    ],
)
def test_only_what_can_still_happen_is_waited_for(slurm, kind, waits):
    wanted = Dependency("5", kind)
    assert dependency.unmet([wanted], slurm) == ([wanted] if waits else [])


@pytest.mark.parametrize(
    ("slurm", "kind", "says"),
    [
        (FakeSlurm(), "afterok", "knows no job 5"),
        (FakeSlurm("", "FAILED\n"), "afterok", "has ended as FAILED"),
        (FakeSlurm("JobState=TIMEOUT"), "afterok", "has ended as TIMEOUT"),
        (FakeSlurm("JobState=COMPLETED"), "afternotok", "ended without error"),
    ],
)
def test_what_would_never_start_is_refused(slurm, kind, says):
    with pytest.raises(UserError, match=says):
        dependency.unmet([Dependency("5", kind)], slurm)
