"""Every input variable of sbatch and srun that changes a job, with the real commands.

The ranks write down where and with what they run; each variable must leave that as it is without one. Those of sbatch
are set where `recipes submit` calls it; those of srun travel with a plain `sbatch job.sbatch` into the job.
"""

import json
import re
from pathlib import Path

import pytest

from superpod.diagnosis import rank_logs
from superpod.slurm.script import batch_script
from superpod.slurm.submission import connection, submit
from tests.slurm.testbed.bed import until
from tests.slurm.testbed.toys import TOY, ToyRun

pytestmark = pytest.mark.long

PLAIN = "PLAIN_NOTHING"
"""A variable that means nothing to Slurm."""

OF_SBATCH = {
    **{"SBATCH_EXPORT": "NONE", "SBATCH_ARRAY_INX": "1-3", "SBATCH_WAIT": "1", "SBATCH_OPEN_MODE": "truncate"},
    **{"SBATCH_NO_REQUEUE": "1", "SBATCH_GET_USER_ENV": "1", "SBATCH_TIMELIMIT": "1", "SBATCH_PARTITION": "low"},
    **{"SBATCH_ACCOUNT": "nobodys", "SBATCH_QOS": "none", "SBATCH_CONSTRAINT": "none", "SBATCH_RESERVATION": "none"},
    **{"SBATCH_OUTPUT": "/dev/null", "SBATCH_ERROR": "/dev/null", "SBATCH_INPUT": "/dev/null", "SBATCH_JOB_NAME": "x"},
    **{"SBATCH_DISTRIBUTION": "cyclic", "SBATCH_MEM_PER_CPU": "300", "SBATCH_MEM_PER_GPU": "300"},
    **{"SBATCH_GPUS": "2", "SBATCH_GPUS_PER_TASK": "1", "SBATCH_GPUS_PER_NODE": "1", "SBATCH_GRES": "gpu:1"},
    **{
        "SBATCH_CPUS_PER_GPU": "2",
        "SBATCH_EXCLUSIVE": "user",
        "SBATCH_OVERCOMMIT": "1",
        "SBATCH_HINT": "nomultithread",
    },
    **{
        "SBATCH_SIGNAL": "B:KILL@60",
        "SBATCH_USE_MIN_NODES": "1",
        "SBATCH_CONTAINER": "/none",
        "SBATCH_THREAD_SPEC": "1",
    },
}
OF_SRUN = {
    **{"SLURM_EXPORT_ENV": "NONE", "SRUN_EXPORT_ENV": "NONE", "SLURM_DISTRIBUTION": "cyclic", "SLURM_LABELIO": "1"},
    **{"SLURM_CPU_BIND": "map_cpu:0", "SLURM_MEM_BIND": "local", "SLURM_MPI_TYPE": "pmi2", "SLURM_KILL_BAD_EXIT": "0"},
    **{"SLURM_MEM_PER_CPU": "1", "SLURM_MEM_PER_GPU": "1", "SLURM_GPUS": "1", "SLURM_GPUS_PER_TASK": "1"},
    **{"SLURM_GPU_BIND": "single:1", "SLURM_STEP_GRES": "gpu:1", "SLURM_GRES": "none", "SLURM_NTASKS_PER_GPU": "1"},
    **{"SLURM_TIMELIMIT": "1", "SLURM_WAIT": "1", "SLURM_THREADS": "1", "SLURM_EXCLUSIVE": "1", "SLURM_EXACT": "1"},
    **{"SLURM_TASK_PROLOG": "/bin/false", "SLURM_TASK_EPILOG": "/bin/false", "SLURM_PROLOG": "/bin/false"},
    **{"SLURM_STDOUTMODE": "none", "SLURM_STDINMODE": "none", "SLURM_UNBUFFEREDIO": "1", "SLURM_OVERCOMMIT": "1"},
    **{"SLURM_WORKING_DIR": "/", "SLURM_REMOTE_CWD": "/", "SRUN_CPUS_PER_TASK": "2", "SLURM_CPUS_PER_GPU": "3"},
    **{
        "SLURM_CONTAINER": "/none",
        "SRUN_CONTAINER": "/none",
        "SLURM_HOSTFILE": "/none",
        "SLURM_DEPENDENCY": "afterok:1",
    },
    **{
        "SLURM_HINT": "nomultithread",
        "SLURM_THREADS_PER_CORE": "2",
        "SLURM_NO_KILL": "1",
        "SLURM_OPEN_MODE": "truncate",
    },
    **{"SLURM_CORE_SPEC": "1", "SLURM_RESERVATION": "none", "SLURM_SIGNAL": "KILL@60", "SLURM_TEST_EXEC": "1"},
    **{"SQUEUE_FORMAT": "nothing", "SLURM_TIME_FORMAT": "relative", "SCANCEL_INTERACTIVE": "1", "SACCT_FORMAT": "x"},
}

TELLER = """\
cd_is_run=$([ "$PWD" = "$SUPERPOD_RUN_DIR" ] && echo true || echo false)
printf '{"node": %s, "local": %s, "ranks": %s, "nodes": %s, "gpus": "%s", "cpus": %s, "cwd": %s, "mine": "%s"}' \\
    "$SLURM_NODEID" "$SLURM_LOCALID" "$SLURM_NTASKS" "$SLURM_NNODES" "$CUDA_VISIBLE_DEVICES" "$(nproc)" "$cd_is_run" \\
    "$PYTHONUNBUFFERED" >"$SUPERPOD_RUN_DIR/rank.$SLURM_PROCID"
echo "rank $SLURM_PROCID"
[ "$SLURM_PROCID" != 0 ] || echo "{}" >"$SUPERPOD_RUN_DIR/done"
"""


class Teller(ToyRun):
    """A run whose ranks only record where they run."""

    def __init__(self, testbed, profile, teller: Path) -> None:
        super().__init__(testbed, profile, attempts=0)
        script = self.run.path / submit.SCRIPT
        ranks = f"python3 {batch_script.shell_quote(str(TOY))}"
        assert ranks in script.read_text()
        script.write_text(script.read_text().replace(ranks, f"bash {batch_script.shell_quote(str(teller))}"))

    def by_recipes(self, **environ: str) -> str:
        """Queue it like `recipes submit`."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            (job,) = submit.queue(connection.Connection(), str(self.run.path), 1).ids
        return job

    def by_hand(self, **environ: str) -> str:
        """Queue it as described in the script's first lines, with `environ` set in the job."""
        words = ["sbatch", "--parsable", f"--output={self.run.path}/slurm-%j.out", f"--chdir={self.run.path}"]
        exported = ",".join(["ALL", *(f"{name}={value}" for name, value in environ.items())])
        words += [f"--export={exported},SUPERPOD_RUN_DIR={self.run.path}", str(self.run.path / submit.SCRIPT)]
        return self.testbed.slurm(*words).strip()

    @property
    def facts(self) -> list[dict]:
        """The records of all ranks, which must agree with the logs."""
        return [json.loads(path.read_text()) for path in sorted(self.run.path.glob("rank.*"))]

    @property
    def resources(self) -> dict[str, str]:
        """What Slurm gave."""
        (attempt,) = self.run.attempts
        fields = self.testbed.slurm("scontrol", "show", "job", "-o", str(attempt.result["job"])).split()
        names = ("Partition", "Account", "TimeLimit", "NumNodes", "NumTasks", "Requeue", "TresPerNode", "OverSubscribe")
        return {name: value for name, _, value in (f.partition("=") for f in fields) if name in names}


@pytest.fixture(scope="module")
def new_teller(slurm_cluster, tmp_path_factory):
    """Makes a run that nothing has queued yet."""
    from superpod.slurm.profiles import profiles

    slurm_cluster.reset()
    folder = tmp_path_factory.mktemp("inherited")
    teller, profile = folder / "teller.sh", folder / "bed.toml"
    teller.write_text(TELLER)
    text = (
        (profiles.DEFAULT_PROFILES / "testbed.toml")
        .read_text()
        .replace("/tmp/superpod-testbed/runs", str(folder / "runs"))
    )
    profile.write_text(text.replace('mem = "8000"', 'mem = "600"'))
    yield lambda: Teller(slurm_cluster, profile, teller)
    slurm_cluster.reset()


def wait_for_all(slurm_cluster):
    until(lambda: not slurm_cluster.slurm("squeue", "-h").strip(), 320, lambda: slurm_cluster.slurm("squeue"))


@pytest.fixture(scope="module")
def by_recipes(slurm_cluster, new_teller):
    """One run per variable of sbatch and one without, queued together; returned when all have ended."""
    runs = {name: new_teller() for name in (PLAIN, *OF_SBATCH)}
    for name, value in {PLAIN: "", **OF_SBATCH}.items():
        runs[name].by_recipes(**{name: value})
    wait_for_all(slurm_cluster)
    return runs


@pytest.fixture(scope="module")
def by_hand(slurm_cluster, new_teller):
    """The same for those of srun."""
    runs = {name: new_teller() for name in (PLAIN, *OF_SRUN)}
    for name, value in {PLAIN: "", **OF_SRUN}.items():
        runs[name].by_hand(**{name: value})
    wait_for_all(slurm_cluster)
    return runs


def counted(rank: dict) -> dict:
    """A rank's record, with the number of its GPUs instead of their indices."""
    return rank | {"gpus": len(rank["gpus"].split(","))}


def same(run: Teller, plain: Teller) -> None:
    assert run.run.done, run.story()
    places = [(rank["node"], rank["local"], rank["ranks"], rank["mine"], rank["cwd"]) for rank in run.facts]
    assert places == [(0, 0, 4, "1", True), (0, 1, 4, "1", True), (1, 0, 4, "1", True), (1, 1, 4, "1", True)], (
        run.story()
    )
    assert [counted(rank) for rank in run.facts] == [counted(rank) for rank in plain.facts], run.story()
    assert run.resources == plain.resources
    (attempt,) = run.run.attempts
    assert attempt.result["state"] == "done"
    assert len(attempt.result["nodes"]) == 2
    lines = [line for log in attempt.logs for _, text in rank_logs.tails(log) for line in text.split("\n")]
    lines += (attempt.path / "logs" / "srun.log").read_text().split("\n")
    assert {line for line in lines if line.startswith("rank ")} <= {f"rank {rank}" for rank in range(4)}
    assert not [line for line in lines if re.match(r" *\d: ", line)], "srun --label"


@pytest.mark.parametrize("name", [PLAIN, *OF_SBATCH])
def test_of_sbatch(by_recipes, name):
    same(by_recipes[name], by_recipes[PLAIN])


@pytest.mark.parametrize("name", [PLAIN, *OF_SRUN])
def test_of_srun(by_hand, name):
    same(by_hand[name], by_hand[PLAIN])
