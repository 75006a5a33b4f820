"""Options of Slurm's commands in the environment are removed."""

import os
import re
import shutil
import subprocess

import pytest

from superpod.slurm.preflight import inherited
from superpod.slurm.script import batch_script
from superpod.slurm.submission.connection import Connection, SshConnection
from tests.slurm.script.test_batch_script import job_for

OF_THE_JOB = {
    *("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_JOB_CPUS_PER_NODE", "SLURM_NNODES"),
    *("SLURM_TASKS_PER_NODE", "SLURM_CONF", "SLURM_RESTART_COUNT", "SLURMD_NODENAME", "SLURM_CLUSTER_NAME"),
}


def input_variables(command: str) -> list[str]:
    """List the names of variables in the binary of a Slurm command: those that it reads, and some that it sets."""
    program = shutil.which(command)
    if program is None:
        pytest.skip(f"{command} is not installed: tests/slurm/testbed/testbed.sh install")
    with open(program, "rb") as file:
        names = re.findall(rb"\0((?:SBATCH|SRUN|SLURM|SLURMD|SALLOC)_[A-Z0-9_]+[A-Z0-9])(?=[\0=])", file.read())
    return sorted({name.decode() for name in names})


def test_options_of_sbatch_are_removed():
    names = [name for name in input_variables("sbatch") if name not in inherited.KEPT_VARIABLES]
    assert {"SBATCH_EXPORT", "SBATCH_ARRAY_INX", "SBATCH_WAIT", "SBATCH_OPEN_MODE", "SBATCH_NO_REQUEUE"} <= {*names}
    mine = {"HOME": "/x", "SLURM_CONF": "/etc/slurm.conf", "NCCL_DEBUG": "INFO"}
    assert inherited.without_options(mine | dict.fromkeys(names, "x")) == mine


@pytest.mark.parametrize("name", ["SBATCH_EXPORT", "SLURM_EXPORT_ENV", "SQUEUE_FORMAT", "SCANCEL_INTERACTIVE"])
def test_commands_run_without_inherited_options(name, monkeypatch):
    monkeypatch.setenv(name, "NONE")
    monkeypatch.setenv("SLURM_CONF", "/etc/mine.conf")
    local = Connection().run(["env"], env={"SUPERPOD_RUN_DIR": "/it's, a run"})
    *_, remote = SshConnection("host")._command(["env"], {"SUPERPOD_RUN_DIR": "/it's, a run"})
    there = subprocess.run(["sh", "-c", remote], capture_output=True, text=True, check=True).stdout
    for seen in (local, there):
        assert f"{name}=" not in seen
        assert "SLURM_CONF=/etc/mine.conf\n" in seen
        assert "SUPERPOD_RUN_DIR=/it's, a run\n" in seen
        assert f"HOME={os.environ['HOME']}\n" in seen


def test_ignored_variables_are_noted_without_values():
    """A value may contain a token, or a line break that would end the comment of --dry-run."""
    assert inherited.ignored_note({"SLURM_JOB_ID": "7", "HOME": "/x"}) == ""
    note = inherited.ignored_note({"SBATCH_EXPORT": "ALL,HF_TOKEN=hf_secret", "SBATCH_COMMENT": "a\nscancel -u me"})
    assert note.startswith("ignored SBATCH_COMMENT, SBATCH_EXPORT")
    assert "hf_secret" not in note
    assert "\n" not in note


def remaining_variables(values: dict[str, str]) -> set[str]:
    """The names that are left when the script's own lines have run under these variables."""
    script = batch_script.render(job_for("testbed"))
    (lines,) = re.findall(r"^for name in .*?^done$", script, re.DOTALL | re.MULTILINE)
    command = ["bash", "-c", f"set -uo pipefail\n{lines}\nexec env"]
    output = subprocess.run(command, env={"PATH": "/usr/bin:/bin", **values}, capture_output=True, text=True).stdout
    return {line.partition("=")[0] for line in output.splitlines()} & {*values}


def test_script_unsets_every_input_variable_of_srun():
    """The names come from srun's binary; the script sets each of these options explicitly (the goldens)."""
    names = {
        name for name in input_variables("srun") if not name.startswith(("SLURM_JOB", "SLURM_SUBMIT_", "SLURM_SPANK_"))
    }
    assert {"SLURM_EXPORT_ENV", "SRUN_EXPORT_ENV", "SLURM_DISTRIBUTION", "SLURM_CPU_BIND", "SLURM_TASK_PROLOG"} <= names
    kept = remaining_variables(dict.fromkeys([*names, *OF_THE_JOB, "SHELL_OPTION", "SUPERPOD_RUN_DIR"], "1"))
    harmless = {"SLURM_WORKING_CLUSTER", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_HET_SIZE"}
    assert kept - harmless == {*OF_THE_JOB, "SHELL_OPTION", "SUPERPOD_RUN_DIR"}
