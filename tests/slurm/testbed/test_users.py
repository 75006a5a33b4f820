"""Two users, one folder of runs: parallel status commands change nothing; nobody changes the other's run."""

import contextlib
import hashlib
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from superpod.runtime.runs.run_folder import RunFolder
from superpod.slurm.profiles import profiles
from tests.conftest import ROOT
from tests.slurm.testbed.bed import BASE, Testbed, run, until

pytestmark = pytest.mark.long

ALICE, BOB, TEAM = "sp14alice", "sp14bob", "sp14team"
PYTHON = "/usr/bin/python3"
"""Another user cannot read a Python below /root: the system's, of the same version, with our packages."""

LOOKS = 30

AT_ONCE = """
import contextlib, io, os, sys
from superpod.cli.app import app
for verb in ("status", "history", "logs", "ckpt", "report"):  # what is loaded lazily is loaded once
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        app([verb, "--help"])
runs, mine, other, count = *sys.argv[1:4], int(sys.argv[4])
looks = [["status", "--all", "--runs", runs], ["status", other], ["status", mine, "--json"], ["history", other],
         ["history", mine], ["logs", other], ["ckpt", "list", other], ["ckpt", "prune", other, "--dry-run"],
         ["status", "--all", "--json", "--runs", runs], ["report", other, "--json"]]
gate, children = os.pipe(), []
for i in range(count):
    child = os.fork()
    if not child:
        os.close(gate[1])
        os.read(gate[0], 1)  # all start together, when the parent closes its end
        try:
            app(looks[i % len(looks)])
        except SystemExit as end:
            sys.stdout.flush()
            os._exit(end.code or 0)
        os._exit(9)
    children.append(child)
os.close(gate[1])
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
print("CODES", codes, file=sys.stderr)
"""

TOY = """
import sys
from pathlib import Path
from superpod.slurm.profiles import sharing
from tests.slurm.testbed.toys import ToyRun

with sharing.umask("0027"):  # as `submit` makes a run folder; the job has the profile's own
    toy = ToyRun(None, Path(sys.argv[1]), nodes=1, attempts=int(sys.argv[2]), max_steps=100_000, step_s=0.2)
print(toy.run.path)
"""


class User:
    """A user of the cluster, and commands as that user."""

    def __init__(self, name: str) -> None:
        self.name = name

    def popen(self, *words: object) -> subprocess.Popen:
        """The system's Python with these arguments."""
        packages = next(path for path in sys.path if path.endswith("site-packages"))
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin",
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{packages}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "SLURM_CONF": os.environ["SLURM_CONF"],
            "HOME": "/nonexistent",
            "COLUMNS": "200",
        }
        who = pwd.getpwnam(self.name)
        return subprocess.Popen(
            [PYTHON, *map(str, words)],
            user=who.pw_uid,
            group=who.pw_gid,
            extra_groups=os.getgrouplist(self.name, who.pw_gid),
            env=environment,
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def recipes(self, *words: object) -> subprocess.CompletedProcess:
        """A command of ours."""
        process = self.popen("-m", "superpod.cli", *words)
        output, errors = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def toy(self, profile: Path, attempts: int) -> RunFolder:
        """A run of the toy, queued by this user."""
        output, errors = self.popen("-c", TOY, profile, attempts).communicate(timeout=120)
        assert output.strip(), errors
        return RunFolder.open(output.strip())


@pytest.fixture
def users(testbed) -> Iterator[tuple[User, User]]:
    version = subprocess.run([PYTHON, "--version"], capture_output=True, text=True).stdout.split()[-1:]
    if not version or version[0].split(".")[:2] != [str(n) for n in sys.version_info[:2]]:
        pytest.skip(f"{PYTHON} is {version}, and this environment's packages are for {sys.version.split()[0]}")
    run(["groupadd", "-f", TEAM])
    for name in (ALICE, BOB):
        run(["useradd", "-M", "-G", TEAM, name], check=False)
        run(["sacctmgr", "-i", "add", "user", name, "Account=acct", "DefaultAccount=acct"], check=False)
    yield User(ALICE), User(BOB)
    for name in (ALICE, BOB):  # scancel takes one
        run(["scancel", "-u", name], check=False)
    until(lambda: not testbed.slurm("squeue", "-h", "-u", f"{ALICE},{BOB}").strip(), 120)
    for name in (ALICE, BOB):
        run(["sacctmgr", "-i", "delete", "user", name], check=False)
        run(["userdel", name], check=False)
    run(["groupdel", TEAM], check=False)


@pytest.fixture
def shared(users) -> Iterator[tuple[Path, Path]]:
    """A folder of runs of the team, and a profile of it with a umask."""
    folder = Path(tempfile.mkdtemp(prefix="shared-", dir=BASE))
    runs, profile = folder / "runs", folder / "shared.toml"
    runs.mkdir()
    shutil.chown(runs, "root", TEAM)
    folder.chmod(0o755)
    runs.chmod(0o3775)
    text = (profiles.DEFAULT_PROFILES / "testbed.toml").read_text()
    text = text.replace('runs = "/tmp/superpod-testbed/runs"', f'runs = "{runs}"\numask = "0027"')
    assert str(runs) in text
    profile.write_text(text)
    yield runs, profile
    shutil.rmtree(folder)


def snapshot(folder: Path) -> dict[str, tuple]:
    """Every file and folder: kind, owner, rights, size, times, contents; all but the time of the last reading."""
    facts = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        s = path.lstat()
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        facts[str(path)] = (s.st_mode, s.st_uid, s.st_gid, s.st_size, s.st_mtime_ns, s.st_ctime_ns, digest)
    return facts


def slurm_facts(testbed: Testbed) -> tuple[str, ...]:
    """The queue and accounting, without values that change over time."""
    queue = testbed.slurm("squeue", "-h", "-a", "-o", "%i %j %u %T %r %V", "--sort=i")
    # Its times follow a requeue seconds later.
    jobs = testbed.slurm("sacct", "-X", "-nP", "-u", f"{ALICE},{BOB}", "-o", "JobIDRaw,JobName,User")
    return queue, *sorted(jobs.splitlines())


def hold(testbed: Testbed, *runs: RunFolder) -> None:
    """Let the runs wait: their running jobs go back into the queue, held, so that nothing but looks can change them."""
    jobs = [str(run.attempts[-1].result["job"]) for run in runs]
    for job in jobs:
        testbed.slurm("scontrol", "requeuehold", job)
    until(lambda: all(testbed.state(job) == "PENDING" for job in jobs), 120)
    until(lambda: not any(testbed.processes(str(run.path)) for run in runs), 60)


def state(user: User, run: RunFolder) -> dict:
    done = user.recipes("status", run.path, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)[0]


def steps(run: RunFolder) -> int:
    return len(run.metrics())


@pytest.mark.timeout(600)
def test_thirty_parallel_status_commands_change_nothing(testbed, users, shared):
    alice, bob = users
    runs, profile = shared
    hers, his = alice.toy(profile, 3), bob.toy(profile, 1)
    until(lambda: steps(hers) > 3 and steps(his) > 3, 120)

    # What a colleague sees while it runs, and may not do.
    seen = state(bob, hers)
    assert (seen["state"], seen["user"]) in {("running", ALICE), ("saving", ALICE)}
    assert oct(hers.path.stat().st_mode)[-3:] == oct((hers.path / "attempts").stat().st_mode)[-3:] == "750"
    assert {oct(path.stat().st_mode)[-3:] for path in hers.path.rglob("*.log")} == {"640"}
    for words in (["cancel"], ["top-up"], ["ckpt", "prune"]):
        refused = bob.recipes(*words, hers.path)
        assert refused.returncode == 2, refused.stdout
        assert f"belongs to {ALICE}, but you are {BOB}: only {ALICE} may" in refused.stderr
    assert state(alice, hers)["state"] in ("running", "saving")

    # A run that lacks two attempts: what `recipes status` once queued by itself.
    for job in [job for job in state(alice, hers)["jobs"] if job["state"] == "PENDING"]:
        testbed.slurm("scancel", job["id"])
    hold(testbed, hers, his)
    files, queue = snapshot(runs), slurm_facts(testbed)
    processes = [
        alice.popen("-c", AT_ONCE, runs, hers.path, his.path, LOOKS),
        bob.popen("-c", AT_ONCE, runs, his.path, hers.path, LOOKS),
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    for output, errors in outputs:
        assert f"CODES {[0] * LOOKS}" in errors, errors[-3000:]
        assert ALICE in output
        assert BOB in output
    assert slurm_facts(testbed) == queue
    assert snapshot(runs) == files

    # What bob may not read is a row that says so.
    hers.path.chmod(0o700)
    rows = json.loads(bob.recipes("status", "--all", "--json", "--runs", runs).stdout)
    assert {(row["user"], row["state"]) for row in rows} >= {(ALICE, "unreadable")}
    assert "Permission denied" in " ".join(row["message"] for row in rows)
    hers.path.chmod(0o2750)

    # The owner's choice, twice at once.
    processes = [alice.popen("-m", "superpod.cli", "top-up", hers.path) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert sum("queued 2 more" in output for output, _ in outputs) == 1, outputs
    assert len(state(alice, hers)["jobs"]) == 3
    with contextlib.suppress(subprocess.TimeoutExpired):
        assert alice.recipes("cancel", hers.path).returncode == 0
    assert state(bob, hers)["state"] == "cancelled"
