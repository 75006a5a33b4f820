"""The script of a fine-tuning run has a step of one task for import and export; other scripts have none."""

import subprocess
import sys
import tarfile
from types import SimpleNamespace
from typing import Any, cast

import pytest

from superpod.errors import UserError
from superpod.runtime.attempts import payload
from superpod.slurm.profiles import profiles
from superpod.slurm.script import batch_script
from superpod.slurm.submission import submit
from tests.slurm.script.test_batch_script import HOSTILE, job_for, shellcheck

CLUSTER = profiles.load("dgx_h100")
"""Its ranks run in a container, which lacks this project."""


def started(model):
    return batch_script.render(job_for("dgx_h100", model=model)).partition('exec "$host_python"')[2]


def test_export_step_of_one_task_follows_the_ranks():
    words = started("/models/llama").partition("\n# ")[0]
    ranks, _, step = words.rpartition("    -- \\\n")
    assert "--ntasks=4" in ranks
    assert "--nodes=1 --ntasks=1 --ntasks-per-node=1" in step
    assert "-m superpod.launch.model_job\n" in step
    assert "model_job" not in started("")


@pytest.mark.parametrize("name", [word for word in HOSTILE if not set(word) & set(",:")])
def test_model_is_mounted_read_only_and_quoted(name, tmp_path):
    text = batch_script.render(job_for("dgx_h100", model=f"/models/{name}"))
    assert shellcheck(text) == ""
    (line,) = [line for line in text.splitlines() if "--container-mounts" in line and "/models/" in line]
    script = f'runs=/runs; printf "%s\\n" {line.strip().rstrip(chr(92))}'
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert f"/models/{name}:/models/{name}:ro,/runs:/runs" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_model_path_that_cannot_be_mounted_is_refused():
    with pytest.raises(UserError, match="which separates mounts in pyxis"):
        started("/models/a,b")


def resolved():
    return SimpleNamespace(data_facts={"finetune": {"model": "/m"}}, is_deferred=False)


def test_carried_project_files_run_in_a_container(tmp_path):
    """The step's module is imported from the carried files alone."""
    files = submit.project_files(cast(Any, resolved()), CLUSTER)
    (tmp_path / "code.tar.gz").write_bytes(payload.pack_runtime(tuple(files.items())))
    with tarfile.open(tmp_path / "code.tar.gz") as archive:
        archive.extractall(tmp_path / "code", filter="data")
    words = (
        "import sys; sys.path.insert(0, sys.argv[1]); import superpod.launch.model_job as m; "
        "import superpod.launch.convert, superpod.weights.serving.servable as s; "
        "print(m.__file__); s.load_tables(); import superpod.collection.registry as r; r.find('tiny_llama3_sft')"
    )
    command = [sys.executable, "-P", "-c", words, str(tmp_path / "code")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(str(tmp_path))
    assert (tmp_path / "code.tar.gz").stat().st_size < 2_000_000  # base64 of it stays below Slurm's 4 MiB
