"""Options, plug-ins and accounts of a profile on a real Slurm."""

import contextlib
import subprocess
import time

import pytest

from superpod.slurm.preflight import sbatch_options
from tests.slurm.testbed.bed import BASE

LUA = """
function slurm_job_submit(job, partitions, uid)
    if job.account == nil then
        slurm.log_user("You must name an account: --account=GROUP")
        return slurm.ERROR
    end
    return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, uid) return slurm.SUCCESS end
return slurm.SUCCESS
"""


@contextlib.contextmanager
def reconfigured(testbed, more: str):
    """The testbed with more lines in its slurm.conf."""
    conf = BASE / "etc" / "slurm.conf"
    text = conf.read_text()
    testbed("ctld-stop")
    conf.write_text(text + more)
    testbed("ctld-start")
    time.sleep(2)
    try:
        yield
    finally:
        testbed("ctld-stop")
        conf.write_text(text)
        testbed("ctld-start")


def test_listed_plug_in_that_does_not_load(testbed, profile, preloaded_cli):
    """`srun --mpi=list` names Debian's pmix, whose library is another package."""
    listed = testbed.slurm("sh", "-c", "srun --mpi=list 2>&1")
    if "pmix" not in listed or subprocess.run(["sh", "-c", "ldconfig -p | grep -q libpmix.so.2"]).returncode == 0:
        pytest.skip("this Slurm has a working pmix, or none")
    path = profile(('mem = "8000"', 'mem = "8000"\nmpi = "pmix"'))
    checked = preloaded_cli("cluster", "check", path)
    assert checked.returncode == 2, checked.stdout
    assert "srun --mpi=pmix fails" in checked.stdout
    submitted = preloaded_cli("submit", "tiny_llama3", "--cluster", path, "--nodes", 1, "--dry-run", timeout=300)
    assert submitted.returncode == 2
    assert "srun --mpi=pmix fails" in submitted.stderr


def test_submit_plug_in_requiring_an_account(testbed, profile, preloaded_cli):
    (BASE / "etc" / "job_submit.lua").write_text(LUA)
    path = profile(('account = "acct"', 'account = ""'))
    with reconfigured(testbed, "JobSubmitPlugins=lua\n"):
        checked = preloaded_cli("cluster", "check", "--no-node", path)
        submitted = preloaded_cli("submit", "tiny_llama3", "--cluster", path, "--nodes", 1, "--dry-run", timeout=300)
    assert (checked.returncode, submitted.returncode) == (2, 2), checked.stdout
    for output in (checked.stdout, submitted.stderr):
        assert "You must name an account" in output


def test_nodelist_must_have_the_size_of_the_run(testbed, profile, preloaded_cli):
    path = profile(('mem = "8000"', 'mem = "8000"\noptions = ["--nodelist=node[2-3]"]'))
    checked = preloaded_cli("cluster", "check", path)
    assert checked.returncode == 0, checked.stdout
    assert "and node2" in checked.stdout
    submit = ("submit", "tiny_llama3", "--cluster", path, "--dry-run")
    two = preloaded_cli(*submit, "--nodes", 2, timeout=300)
    one = preloaded_cli(*submit, "--nodes", 1, timeout=300)
    assert two.returncode == 0, two.stderr
    assert one.returncode == 2
    assert "invalid number of nodes" in one.stderr


def test_abbreviations_of_refused_options_are_refused(testbed):
    """sbatch takes --arr for --array; the table refuses every beginning of a name."""
    for name, option in sbatch_options.OPTIONS.items():
        beginnings = {name[:size] for size in range(1, len(name))} - {*sbatch_options.OPTIONS}
        if option.rejected:
            assert all(sbatch_options.problem(f"--{beginning}=1") for beginning in beginnings)
    testbed.slurm("sbatch", "--test-only", "--arr=1-3", "--wrap=true", "--account=acct")
