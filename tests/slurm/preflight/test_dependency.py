"""`--after`: dependencies that Slurm would accept although they can never be met are refused."""

import pytest

from superpod.errors import UserError
from superpod.slurm.preflight import dependency
from superpod.slurm.preflight.dependency import Dependency
from superpod.slurm.submission.connection import Connection


class FakeSlurm(Connection):
    """Fake: `controller` and `accounting` are what scontrol and sacct print; '' = they know no such job."""

    def __init__(self, controller: str = "", accounting: str = "") -> None:
        self.controller, self.accounting = controller, accounting

    def run(self, command, **_how):
        if command[0] == "scontrol" and not self.controller:
            raise UserError("slurm_load_jobs error: Invalid job id specified")
        return self.controller if command[0] == "scontrol" else self.accounting


TASK = "JobId=7 ArrayJobId=5 ArrayTaskId=2"
"""of an array whose other task, job 6, the controller has forgotten"""


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("123", Dependency("123", "afterok")),
        ("123:afterany", Dependency("123", "afterany")),
        ("afterany:123", Dependency("123", "afterany")),
        ("123_4:after", Dependency("123_4", "after")),
    ],
)
def test_parse_job_and_type(text, means):
    assert dependency.parse(text) == means


@pytest.mark.parametrize("text", ["", "data", "123:afterOK", "123:ok", "12 3", "123;touch pwned", "123:", ":123"])
def test_invalid_dependency_is_refused(text):
    with pytest.raises(UserError, match="--after"):
        dependency.parse(text)


@pytest.mark.parametrize(
    ("slurm", "kind", "waits"),
    [
        (FakeSlurm("JobState=RUNNING"), "afterok", True),
        (FakeSlurm("JobState=PENDING"), "after", True),
        (FakeSlurm("JobState=RUNNING"), "after", False),
        (FakeSlurm("JobState=COMPLETED"), "afterok", False),
        (FakeSlurm("", "5|COMPLETED\n"), "afterok", False),
        (FakeSlurm("", "5|CANCELLED by 0\n"), "afterany", False),
        (FakeSlurm("JobId=5 JobState=COMPLETED\nJobId=6 JobState=PENDING\n"), "afterok", True),
        (FakeSlurm("JobState=FAILED"), "afternotok", False),
        (FakeSlurm(f"{TASK} JobState=RUNNING", "6|COMPLETED\n7|COMPLETED\n"), "afterok", True),
        (FakeSlurm(f"{TASK} JobState=COMPLETED", "6|COMPLETED\n7|RUNNING\n"), "afterok", False),
    ],
)
def test_met_dependencies_are_dropped(slurm, kind, waits):
    wanted = Dependency("5", kind)
    assert dependency.unmet_dependencies([wanted], slurm) == ([wanted] if waits else [])


@pytest.mark.parametrize(
    ("slurm", "kind", "says"),
    [
        (FakeSlurm(), "afterok", "has no job 5"),
        (FakeSlurm("", "5|FAILED\n"), "afterok", "ended as FAILED"),
        (FakeSlurm("JobState=TIMEOUT"), "afterok", "ended as TIMEOUT"),
        (FakeSlurm(f"{TASK} JobState=RUNNING", "6|FAILED\n7|RUNNING\n"), "afterok", "ended as FAILED"),
        (FakeSlurm("JobState=COMPLETED"), "afternotok", "job 5 succeeded"),
    ],
)
def test_impossible_dependency_is_refused(slurm, kind, says):
    with pytest.raises(UserError, match=says):
        dependency.unmet_dependencies([Dependency("5", kind)], slurm)
