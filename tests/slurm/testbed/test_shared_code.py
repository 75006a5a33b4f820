"""Two users share a folder for runs: no file of one is executed in a job of the other."""

import pwd
import stat
import subprocess
from pathlib import Path

import pytest

from superpod.runtime.attempts import payload
from superpod.runtime.runs.run_folder import RunFolder
from superpod.slurm.profiles import profiles
from superpod.slurm.script import batch_script, cluster_variables
from tests.slurm.jobs import planned
from tests.slurm.testbed.bed import Testbed, until
from tests.slurm.testbed.test_users import ALICE, BOB, User, shared, users
from tests.slurm.testbed.toys import TOY

assert shared
assert users
RECIPE = "toy"

PLANT = """
import os, sys
from pathlib import Path
runs, recipe, first = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
hostile = "import os; open('/tmp/sp25-pwned-' + str(os.getuid()), 'a').write(__file__ + chr(10))\\n"
ours = ["runtime/attempts/attempt.py", "runtime/rank/rank.py", "runtime/processes/stray_processes.py"]
names = [*("superpod/" + name for name in ours), "recipe.py", "json.py"]
def plant(folder):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(hostile)
os.umask(0)
(runs / ".jobs").mkdir()
(runs / recipe).mkdir()
for job in range(first, first + 20):
    plant(runs / ".jobs" / str(job) / "code")
    plant(runs / recipe / f"20260101T000000Z-j{job}" / "code")
    (runs / recipe / f"20260101T000000Z-j{job}" / "run.json").write_text('{"recipe": "%s"}' % recipe)
(runs / ".models").mkdir()
(runs / ".samples").symlink_to("/tmp")
plant(runs)
"""
"""By the hostile user: code at every place that earlier versions executed, for the next twenty job numbers."""


@pytest.fixture
def script(shared) -> Path:
    """A rendered script of the toy, one node and two ranks."""
    runs, profile = shared
    cluster = profiles.load(str(profile))
    text = batch_script.render(
        batch_script.BatchJob(
            recipe=RECIPE,
            cluster=cluster,
            nodes=1,
            gpus=2,
            runs=str(runs),
            variables=tuple(cluster_variables.variables(cluster, planned())),
            recipe_file='OPTIONS = {"max_steps": 40, "save_every": 5, "step_s": 0.2}',
            runtime=payload.pack_runtime(),
            facts={"max_steps": 40, "rehearsal": True},
            python="python3",
            time="5:00",
        )
    )
    file = runs.parent / "job.sbatch"
    file.write_text(text.replace(batch_script.RANK, batch_script.shell_quote(str(TOY))))
    file.chmod(0o644)
    return file


def sbatch(user: User, script: Path, runs: Path) -> str:
    """Submit as this user from the folder for runs, where other users may have placed files."""
    words = ["import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)", "sbatch", "--parsable"]
    process = user.popen("-c", *words, f"--chdir={runs}", f"--output={runs}/%u-%j.out", script)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output.strip()


def run_as(user: User, code: str, *words: object) -> str:
    """Run Python code as this user; return its output and errors."""
    return "".join(user.popen("-c", code, *words).communicate(timeout=60))


def next_job(testbed: Testbed) -> int:
    job = testbed.slurm("sbatch", "--parsable", "--hold", "--wrap", "true").strip()
    testbed.slurm("scancel", job)
    return int(job) + 1


def list_runs(user: str, runs: Path) -> list[RunFolder]:
    found = [facts.parent for facts in runs.glob("*/*/run.json") if facts.owner() == user]
    return [RunFolder.open(run) for run in found]


@pytest.mark.timeout(600)
def test_code_of_another_user_is_not_executed(testbed, users, shared, script):
    alice, bob = users
    runs, _ = shared
    pwned = [*Path("/tmp").glob("sp25-pwned-*")]
    for file in pwned:
        file.unlink()
    assert not run_as(bob, PLANT, runs, RECIPE, next_job(testbed))

    jobs = [sbatch(alice, script, runs) for _ in range(2)]
    until(lambda: [run for run in list_runs(ALICE, runs) if len(run.metrics()) > 2], 120)
    (first,) = [run for run in list_runs(ALICE, runs) if len(run.metrics()) > 2][:1]
    job = str(first.attempts[-1].result["job"])
    testbed.slurm("scontrol", "requeue", job)  # the same job again: it goes on with its own run
    for number in jobs:
        assert testbed.until_ended(number) == "COMPLETED", (runs / f"{ALICE}-{number}.out").read_text()

    mine = list_runs(ALICE, runs)
    assert len(mine) == 2, "a run for each submission, and none more for the requeue"
    assert [run.done for run in mine] == [True, True]
    assert len(first.attempts) == 2
    assert first.attempts[1].result["before"] > 0, "from its last checkpoint"
    assert {run.path.parent.name for run in mine} == {f"{RECIPE}.{ALICE}"}, "the other's folder is not used"
    assert not [*Path("/tmp").glob("sp25-pwned-*")], [file.read_text() for file in Path("/tmp").glob("sp25-pwned-*")]
    code = first.path
    for run in mine:
        for path in (run.path.parent, run.path, *run.path.rglob("*")):
            facts = path.lstat()
            assert facts.st_uid == pwd.getpwnam(ALICE).pw_uid, path
            assert path.is_symlink() or not facts.st_mode & 0o022, path
        (code,) = run.path.glob("code.*")
        assert stat.S_IMODE(code.stat().st_mode) == 0o700

    # What bob then may not do: change a run, or put his own in its place.
    attempt = "import os, sys; os.rename(sys.argv[1], sys.argv[1] + '.old')"
    for path in (first.path, first.path.parent, code / "recipe.py"):
        assert "Permission denied" in run_as(bob, attempt, path) or "not permitted" in run_as(bob, attempt, path)


@pytest.mark.timeout(300)
def test_run_writable_by_others_is_not_trained(testbed, users, shared, script):
    """A run of before, whose folder its group may write to; and one in a folder of another user's."""
    alice, _ = users
    runs, profile = shared
    made = alice.toy(profile, 0)
    (made.path / "checkpoints").chmod(0o2770)
    refused = alice.recipes("top-up", made.path)
    assert refused.returncode == 2, refused.stdout
    assert f"{made.path / 'checkpoints'} is writable by its group (mode 2770)" in refused.stderr
    assert f"chmod -R go-w {made.path / 'checkpoints'}" in refused.stderr
    job = testbed.slurm(
        *("runuser", "-u", ALICE, "--", "env", f"SUPERPOD_RUN_DIR={made.path}", "sbatch", "--parsable"),
        *(f"--output={made.path}/slurm-%j.out", str(script)),
    ).strip()
    assert testbed.until_ended(job) == "FAILED"
    assert "is writable by its group" in made.output(job).read_text()
    assert not made.attempts

    (made.path / "checkpoints").chmod(0o2750)
    theirs = runs / "theirs"
    subprocess.run(["install", "-d", "-o", BOB, "-m", "1777", theirs], check=True)
    moved = made.path.rename(theirs / made.path.name)
    refused = alice.recipes("top-up", moved)
    assert refused.returncode == 2, refused.stdout
    assert f"{theirs} belongs to {BOB}" in refused.stderr
