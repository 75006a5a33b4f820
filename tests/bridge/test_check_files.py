"""Let Megatron-Bridge validate exported files, in the environment of `SUPERPOD_BRIDGE_PYTHON` (docs/bridge.md)."""

import json
import os
import subprocess

import pytest

from superpod.bridge.export import export
from superpod.collection import registry
from superpod.planner import hardware
from superpod.requests.request import Request
from tests.bridge.hf_configs import write_hf_config
from tests.conftest import ROOT

PYTHON = os.environ.get("SUPERPOD_BRIDGE_PYTHON")
RECIPES = (
    "llama3_70b_pretrain_h100_bf16",
    "llama31_405b_pretrain_gb200_mxfp8",
    "llama31_8b_lora_h100_bf16",
    "qwen25_7b_sft_h200_bf16",
    "qwen3_30b_a3b_pretrain_h100_fp8cs",
    "deepseek_v3_pretrain_b200_bf16",
    "deepseek_v3_sft_h100_fp8cs",
    "gemma3_1b_pretrain_a100_bf16",
    "gpt_oss_20b_sft_h200_fp8cs",
    "nemotron4_15b_pretrain_b200_mxfp8",
    "mistral_7b_dora_h100_bf16",
)

pytestmark = [
    pytest.mark.nemo,
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON, reason="SUPERPOD_BRIDGE_PYTHON is not set: see docs/bridge.md"),
]


def validate(files):
    """Return file -> error of Megatron-Bridge, or None. `files` has a file, a model and a GPU per entry."""
    requests = [
        {"file": str(file), "hf_config": str(file.parent / "hf" / model), "sm": hardware.node(gpu).gpu.sm}
        for file, model, gpu in files
    ]
    done = subprocess.run(
        [str(PYTHON), "-m", "superpod.bridge.check_files"],
        input=json.dumps(requests),
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def exported(nemo, tmp_path_factory):
    """Return name -> (file, model, GPU) of exported recipes."""
    from superpod.requests.resolve import resolve

    folder = tmp_path_factory.mktemp("bridge")
    files = {}
    for name in RECIPES:
        recipe = registry.find(name)
        model = recipe.model.name
        if not (folder / "hf" / model).exists():
            write_hf_config(model, folder / "hf" / model)
        partial = resolve(Request(recipe=name)).partial
        file = folder / f"{name}.py"
        file.write_text(export(partial, recipe, environment={}, command="recipes export", file=file.name).file)
        files[name] = (file, model, recipe.gpu)
    return files


def test_megatron_bridge_accepts_the_exported_files(exported):
    answers = validate(exported.values())
    assert len(answers) == len(RECIPES)
    assert {file: error for file, error in answers.items() if error} == {}


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("provider.tensor_model_parallel_size = 4", "provider.tensor_model_parallel_size = 3", "not divisible"),
        ("provider.seq_length = 8192", "provider.seq_length = 4096", "equence length"),
    ],
)
def test_megatron_bridge_refuses_a_file_with_a_mistake(exported, old, new, error):
    file, model, gpu = exported["llama3_70b_pretrain_h100_bf16"]
    text = file.read_text()
    assert old in text
    broken = file.with_name("broken.py")
    broken.write_text(text.replace(old, new))
    assert error in (validate([(broken, model, gpu)])[str(broken)] or "")
