"""A fine-tuning run with `recipes submit` on the testbed: the job imports, trains and exports."""

import json
import os
import subprocess
import sys

import pytest

from superpod.runtime.runs.run_folder import RunFolder
from tests.conftest import ROOT
from tests.slurm.testbed.test_train import submitted, until_done
from tests.weights import tiny

pytestmark = [pytest.mark.nemo, pytest.mark.train, pytest.mark.long]

SMALL = ("data.seq_length=64", "data.global_batch_size=8", "optim.config.lr=2e-3", "trainer.max_steps=20")
ONE = ("trainer.devices=1", "trainer.strategy.tensor_model_parallel_size=1", "trainer.strategy.sequence_parallel=False")


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A tiny Hugging Face folder that fits the recipe, and samples."""
    folder = tmp_path_factory.mktemp("given")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.weights.tiny", str(folder / "model")]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
    prompts = [row for row in tiny.sums(300) if "prompt" in row]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    return folder


def test_the_job_imports_trains_and_exports(testbed, profile, recipes_cli, given):
    words = ("tiny_llama3_lora", "--cluster", profile(), *SMALL, *ONE)
    run = submitted(recipes_cli, *words, "--model", given / "model", "--data", given / "data.jsonl")
    until_done(run)
    assert (run.path / "hf" / "config.json").is_file()
    assert (run.path / "hf-adapter" / "adapter_config.json").is_file()
    adapter = json.loads((run.path / "hf-adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == str(given / "model")
    printed = (run.attempts[-1].path / "export-step.log").read_text()
    assert "evaluation of the folder with transformers" in printed
    assert "servable by vLLM" in printed
    assert "imported: " in (run.attempts[0].path / "import.log").read_text()
    second = submitted(recipes_cli, *words, "--model", given / "model", "--data", given / "data.jsonl")
    until_done(second)
    assert not (second.attempts[0].path / "import.log").exists()  # imported once for both
    assert RunFolder.open(second.path).state() == "done"
