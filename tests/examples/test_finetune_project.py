"""The worked example runs where this project cannot be imported: its own tests, and two steps of training."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT

EXAMPLE = ROOT / "examples" / "finetune_project"
ALONE = (
    "import runpy, sys\n"
    "from superpod.rehearsal.script import block_project_imports\n"
    "sys.argv = ['pytest', '-q', '-p', 'no:cacheprovider', 'tests']\n"
    "with block_project_imports():\n"
    "    runpy.run_module('pytest', run_name='__main__')\n"
)


@pytest.fixture
def project(tmp_path):
    return shutil.copytree(EXAMPLE, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__", "*.idx.*"))


def start(*words, cwd):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=900
    )


def test_the_example_names_what_it_needs():
    text = (EXAMPLE / "pyproject.toml").read_text()
    ours = (ROOT / "pyproject.toml").read_text()
    for pin in ("nemo_toolkit[core]==2.7.3", "nemo_run==0.11.1", "megatron-core==0.15.3"):
        assert f'"{pin}"' in text
        assert f'"{pin}"' in ours
    for name in ("training", "validation"):
        assert [json.loads(line)["output"] for line in (EXAMPLE / "data" / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.nemo
@pytest.mark.slow
def test_its_recipe_is_what_export_writes(tmp_path, preloaded_cli, golden):
    words = re.search(r"recipes (export .*) --to my_recipe.py", (EXAMPLE / "README.md").read_text())
    assert words
    done = preloaded_cli(*words[1].split(), "--to", "my_recipe.py", cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    golden(EXAMPLE / "my_tuning" / "my_recipe.py", (tmp_path / "my_recipe.py").read_text())


@pytest.mark.nemo
@pytest.mark.slow
def test_its_own_tests_pass_without_this_project(project):
    done = start("-c", ALONE, cwd=project)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "3 passed" in done.stdout


@pytest.mark.nemo
@pytest.mark.train
@pytest.mark.slow
def test_it_trains_without_this_project(project):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = start(*torchrun, "-m", "superpod.rehearsal.script", "my_tuning/train.py", "2", cwd=project)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    losses = re.findall(r"iteration \d/1 .* reduced_train_loss: (\d+\.\d+)", done.stdout)
    assert len(losses) == 2
    assert all(4 < float(loss) < 7 for loss in losses)  # ln 280 = 5.6
