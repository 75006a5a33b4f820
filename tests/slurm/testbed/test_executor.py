"""NeMo-Run's own experiments through our executor: every defect of NeMo-Run 0.11.1 that it works around."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slurm.testbed.bed import until

pytestmark = pytest.mark.nemo

SUBMIT = """
import os, sys
from pathlib import Path
import nemo_run as run
from superpod.slurm.executor import executor, finish

if __name__ == "__main__":
    words = dict(word.split("=", 1) for word in sys.argv[2:])
    fields = {"env_vars": {"MINE": os.environ["MINE_VALUE"], "HF_TOKEN": "hf_neverwritten1234"}, "time": "5:00"}
    fields |= {key: words[key] for key in ("partition",) if key in words}
    if "launcher" in words:
        fields["launcher"] = words["launcher"]
    where = executor(sys.argv[1], nodes=2, gpus=int(words.get("gpus", 2)), **fields)
    with run.Experiment("mine", enable_goodbye_message=False) as experiment:
        experiment.add(run.Script(inline=Path("script.sh").read_text()), executor=where, name="train")
        experiment.run(detach=False, tail_logs=False)
    finish(experiment)
"""


@dataclass
class Submitted:
    """A script that has submitted an experiment, and what it printed."""

    process: subprocess.Popen
    output: str

    @property
    def returncode(self) -> int | None:
        return self.process.returncode


@pytest.fixture
def submit(tmp_path, profile, testbed):
    """Run the script as an experiment; returns the process, and what the job wrote."""
    where = profile()
    (tmp_path / "submit.py").write_text(SUBMIT)

    def call(script: str, *words: str, mine: str = "plain", wait: bool = True) -> Submitted:
        (tmp_path / "script.sh").write_text(script)
        command = [sys.executable, "-W", "ignore", "submit.py", str(where), *words]
        env = os.environ | {"MINE_VALUE": mine, "NEMORUN_HOME": str(tmp_path / "nemorun")}
        process = subprocess.Popen(
            command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return Submitted(process, process.communicate(timeout=300)[0] if wait else "")

    return call


def logs(folder: Path) -> str:
    return "\n".join(p.read_text(errors="replace") for p in sorted(folder.rglob("log-*.out")))


SAY = 'echo "rank=$RANK local=$LOCAL_RANK node=$GROUP_RANK port=$MASTER_PORT mine=[$MINE] ${#HF_TOKEN}"\n'


@pytest.mark.parametrize("value", ["plain", "bar baz", "x;touch pwned", "$(touch pwned)", "it's"])
def test_variables_arrive_and_nothing_else_happens(submit, value, tmp_path):
    done = submit(SAY, mine=value)
    assert done.returncode == 0, done.output
    lines = [line for line in logs(tmp_path).splitlines() if line.startswith("rank=")]
    assert len(lines) == 4, done.output
    assert all(f"mine=[{value}]" in line for line in lines)
    assert {line.split()[2] for line in lines} == {"node=0", "node=1"}
    assert {line.split()[0] for line in lines} == {"rank=0", "rank=1", "rank=2", "rank=3"}
    assert "port=29500" not in lines[0]
    assert not list(tmp_path.rglob("pwned"))
    assert all(line.endswith(f" {len('hf_neverwritten1234')}") for line in lines), "the token has arrived"
    files = [path for path in (tmp_path / "nemorun").rglob("*") if path.is_file()]
    written = [path.name for path in files if b"neverwritten" in path.read_bytes()]
    assert [name for name in written if name != "__main__.py"] == [], "which is this test's own script"


def test_a_failed_job_ends_the_script_with_1(submit):
    done = submit("exit 3\n")
    assert done.returncode == 1, done.output


def test_a_requeued_job_is_no_failure(submit, testbed, tmp_path):
    """Preempted with a grace time: requeued, not failed, and the blocking wait goes on to the end."""
    until_preempted = 'test "${SLURM_RESTART_COUNT:-0}" != 0 || sleep 300\n'
    process = submit(until_preempted, "partition=low", "gpus=8", wait=False).process
    try:
        until(lambda: testbed.slurm("squeue", "-h", "-p", "low", "-t", "R").strip(), 120)
        testbed.slurm("sbatch", "-p", "batch", "-N4", "--gpus-per-node=8", "-o", "/dev/null", "--wrap", "sleep 5")
        output = process.communicate(timeout=400)[0]
    finally:
        process.kill()
    job_output = "\n".join(path.read_text() for path in sorted(tmp_path.rglob("sbatch_train_*.out")))
    assert process.returncode == 0, f"{output}\n{job_output}\n{logs(tmp_path)}"
    assert re.search(r"Restarts=[1-9]", testbed.slurm("scontrol", "show", "job"))
