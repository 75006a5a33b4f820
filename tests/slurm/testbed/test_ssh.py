"""A cluster behind SSH: a real sshd on this machine, whose shell has the testbed's Slurm."""

import getpass
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from superpod.collection import recipe_job, registry
from superpod.errors import UserError
from superpod.requests.request import Request
from superpod.requests.resolve import ResolvedRun
from superpod.runtime.runs.run_folder import RunFolder
from superpod.slurm.preflight import preflight
from superpod.slurm.profiles import live_cluster, profiles
from superpod.slurm.status import mirror, run_views
from superpod.slurm.submission import connection, submit
from tests.slurm.testbed.bed import until

pytestmark = pytest.mark.long

PLAN = {
    "layouts": [{"step_time_s": 1.0, "checkpoint_bytes": 1 << 20, "verdict": "ok", "reserved_gib": 1.0, "mfu": 0.4}]
}


@pytest.fixture
def sshd(tmp_path):
    """Port and key of an sshd that lets this user in."""
    if not shutil.which("sshd"):
        pytest.skip("no sshd: apt-get install openssh-server")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    (tmp_path / "keys").write_text((tmp_path / "user.pub").read_text())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = tmp_path / "sshd_config"
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {tmp_path}/host\nAuthorizedKeysFile {tmp_path}/keys\n"
        f"PidFile {tmp_path}/pid\nStrictModes no\nPermitRootLogin yes\nUsePAM no\n"
        f"SetEnv SLURM_CONF={os.environ['SLURM_CONF']}\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    process = subprocess.Popen([shutil.which("sshd") or "sshd", "-D", "-f", config], stderr=subprocess.DEVNULL)
    home = Path.home() / ".ssh"
    home.mkdir(mode=0o700, exist_ok=True)
    until(lambda: _listens(port), 20)
    known = subprocess.run(["ssh-keyscan", "-p", str(port), "127.0.0.1"], capture_output=True, text=True).stdout
    before = (home / "known_hosts").read_text() if (home / "known_hosts").exists() else ""
    (home / "known_hosts").write_text(before + known)
    yield port, tmp_path / "user"
    (home / "known_hosts").write_text(before)
    process.terminate()
    process.wait(10)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def behind(testbed, profile, sshd):
    """The testbed's profile, with a login behind SSH."""
    port, key = sshd
    file = profile()
    table = f'\n[login]\nhost = "127.0.0.1"\nuser = "{getpass.getuser()}"\nport = {port}\nkey = "{key}"\n'
    file.write_text(file.read_text() + table)
    return profiles.load(str(file))


def resolved_run() -> ResolvedRun:
    """A run that ends at once: its recipe file refuses to be built."""
    return ResolvedRun(
        request=Request("tiny_llama3"),
        job=recipe_job.job(registry.find("tiny_llama3")),
        plan=PLAN,
        nodes=1,
        gpus_per_node=1,
        max_steps=5,
        save_every=5,
        data_facts={},
        lines=["a = 1"],
        source="def recipe():\n    raise SystemExit('planted')\n",
    )


def test_submit_and_status_through_ssh(behind, testbed, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    slurm = connection.connect(behind)
    assert slurm.remote
    submission = submit.Submission(resolved_run(), behind)
    site = live_cluster.query_cluster(
        slurm, behind, submission.folder, preflight.paths_to_check(behind), submit.ranks_python(behind)
    )
    assert preflight.findings(preflight.Case(submission, site)) == []
    run = submit.new_run(submission, slurm)
    jobs = submit.queue(slurm, run, 2).ids
    submit.record_jobs(slurm, run, jobs)
    assert len(jobs) == 2
    until(lambda: not testbed.slurm("squeue", "-h").strip(), 600)  # NeMo is imported
    assert "versions: torch" in "".join(p.read_text() for p in Path(run).rglob("*.log")), "a rank has begun"
    here = mirror.fetch(slurm, submission.folder)
    copy = RunFolder.open(here.path / "tiny_llama3" / Path(run).name)
    seen = run_views.summarize_runs([copy], slurm, here.users)[0]
    assert seen.state == "failed"
    assert seen.attempts == len(RunFolder.open(run).attempts)


def test_hostile_arguments_are_quoted_through_ssh(behind, tmp_path):
    slurm = connection.connect(behind)
    for value in ("a b", "it's", "$(touch pwned)", "; touch pwned", "né ☃", "a\nb"):
        assert slurm.run(["printf", "%s", value]) == value
        assert slurm.run(["sh", "-c", 'printf %s "$MINE"'], env={"MINE": value}) == value
        assert slurm.shell('printf %s "$1"', value) == value


def test_unreachable_login_is_reported(behind):
    dead = connection.SshConnection("127.0.0.1", port=1)
    with pytest.raises(UserError, match="true: "):
        dead.run(["true"])
