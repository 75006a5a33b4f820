"""Every script of launchers/ runs: with tiny models on this machine, and with a dry run where it needs a cluster."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import ROOT
from tests.weights import tiny

pytestmark = pytest.mark.nemo

LAUNCHERS = ROOT / "launchers"


def start(folder, *words, **variables):
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **variables}
    return subprocess.run(
        [str(word) for word in words], cwd=folder, env=environ, capture_output=True, text=True, timeout=900
    )


def test_every_launcher_is_short_and_in_the_table():
    names = {path.name for path in LAUNCHERS.iterdir() if path.suffix in (".py", ".sh")}
    assert names == {"local.py", "finetune.sh", "slurm.py", "nemo_run_factory.sh"}
    table = (LAUNCHERS / "README.md").read_text()
    for name in names:
        assert f"| `{name}` |" in table
        assert len((LAUNCHERS / name).read_text().splitlines()) < 60


@pytest.mark.slow
def test_local_trains(tmp_path):
    done = start(tmp_path, sys.executable, LAUNCHERS / "local.py")
    assert done.returncode == 0, done.stderr[-3000:]
    assert list((tmp_path / "logs").rglob("*.distcp"))


@pytest.mark.slow
def test_a_factory_is_found_by_nemo(tmp_path):
    done = start(tmp_path, "sh", LAUNCHERS / "nemo_run_factory.sh", "tiny_llama3", "--dryrun", "--yes")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "max_steps" in done.stdout
    assert "100" in done.stdout


@pytest.mark.long
def test_finetune_writes_a_hugging_face_folder(tmp_path):
    tiny.folder(tmp_path / "model", "llama", **tiny.RECIPE)
    samples = [sample for sample in tiny.sums(200) if "prompt" in sample]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, samples)))
    words = ("trainer.max_steps=4", "trainer.val_check_interval=2", "data.seq_length=64", "data.global_batch_size=8")
    done = start(
        tmp_path, "sh", LAUNCHERS / "finetune.sh", "model", "data.jsonl", "out", *words, RECIPE="tiny_llama3_sft"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"


def test_finetune_without_a_model_says_how_it_is_called(tmp_path):
    done = start(tmp_path, "sh", LAUNCHERS / "finetune.sh", "model")
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")
