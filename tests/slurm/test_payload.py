"""What a job carries to its nodes, under every Python that a node may have: 3.9 is RHEL 9's, 3.10 that of DGX OS 6."""

import io
import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from superpod.node import payload
from superpod.node.run_folder import RunFolder
from superpod.slurm import batch_script, environment, profiles
from tests.slurm.jobs import planned

PYTHONS = ("3.9", "3.10", "3.11", "3.12", "3.13")
NEEDS_LIGHTNING = "superpod.node.callback"

IMPORTS = """
import compileall, importlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
for path in sorted((root / "superpod").rglob("*.py")):
    compile(path.read_text(encoding="utf-8"), str(path), "exec")
    module = ".".join(path.relative_to(root).with_suffix("").parts)
    if module != sys.argv[2]:
        importlib.import_module(module)
        print(module)
from superpod.node.pairs import rounds
from superpod.node.redaction import redact_text
assert len([pair for pairs in rounds(5) for pair in pairs]) == 10
assert redact_text("--token 'x y' https://me:pw@host/") == "--token '<redacted>' https://<redacted>@host/"
"""

SLURM = {
    "scontrol": 'case "$2" in hostnames) echo node1 ;; job) echo "JobState=RUNNING EndTime=Unknown" ;; esac',
    "squeue": "",
    "scancel": "",
    "sbatch": "",
}
ENDS = {
    "done": 'echo "{}" >"$SUPERPOD_RUN_DIR/done"',
    "failed": 'echo "srun: error: no such node"; exit 3',
}


@pytest.fixture(params=PYTHONS)
def python(request) -> str:
    """An interpreter of that version, without any package: pyenv's, or the one on PATH."""
    installed = sorted((Path.home() / ".pyenv" / "versions").glob(f"{request.param}.*/bin/python3"))
    path = str(installed[-1]) if installed else shutil.which(f"python{request.param}")
    if path is None:
        pytest.skip(f"python{request.param} is not on this machine: pyenv install {request.param}")
    return path


def test_all_of_it_imports(python, tmp_path):
    with tarfile.open(fileobj=io.BytesIO(payload.runtime())) as archive:
        archive.extractall(tmp_path, filter="data")
    files = sorted((tmp_path / "superpod").rglob("*.py"))
    command = [python, "-S", "-W", "error", "-c", IMPORTS, str(tmp_path), NEEDS_LIGHTNING]
    done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == len(files) - 1
    assert "superpod.node.attempt" in done.stdout.split()


@pytest.mark.parametrize("state", ENDS)
def test_a_plain_sbatch_makes_a_run_of_its_own(python, state, tmp_path):
    """The rendered script on a node of that Python, with commands of Slurm that only look so."""
    bin_folder, runs = tmp_path / "bin", tmp_path / "it's runs"
    bin_folder.mkdir()
    for name, body in {**SLURM, "srun": ENDS[state]}.items():
        (bin_folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (bin_folder / name).chmod(0o755)
    cluster = profiles.load("testbed")
    cluster = cluster.model_copy(update={"software": cluster.software.model_copy(update={"host_python": python})})
    lines = ("trainer.max_steps = 5", "", "  data.paths[0] = '#<< a b  '")
    job = batch_script.BatchJob(
        recipe="tiny_llama3",
        cluster=cluster,
        nodes=1,
        gpus=1,
        runs=str(runs),
        variables=tuple(environment.variables(cluster, planned(cluster.gpu))),
        recipe_file="def recipe(): ...",
        runtime=payload.runtime(),
        recipe_lines=lines,
        facts={"max_steps": 5},
    )
    script = tmp_path / "job.sbatch"
    script.write_text(batch_script.render(job))
    of_the_job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_JOB_NAME": "tiny_llama3"}
    done = subprocess.run(
        ["bash", script],
        env={"PATH": f"{bin_folder}:/usr/bin:/bin", "HF_TOKEN": "hf_neverwritten1234", **of_the_job},
        capture_output=True,
        text=True,
        timeout=120,
    )
    (folder,) = (runs / "tiny_llama3").glob("*-j7")
    run = RunFolder.open(folder)
    (attempt,) = run.attempts
    assert attempt.result["state"] == state, done.stdout + done.stderr
    assert done.returncode == (0 if state == "done" else 1)
    assert (run.path / "recipe.txt").read_text() == "".join(f"{line}\n" for line in lines)
    assert run.facts["max_steps"] == 5
    assert json.loads((attempt.path / "env.json").read_text())["environment"]["HF_TOKEN"] == "<redacted>"
    if state == "failed":
        assert attempt.result["message"] == "srun: error: no such node (attempts/001/logs/srun.log)"
