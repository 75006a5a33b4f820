"""Test fields for attention kernels and FP8 of hybrid models."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.nemo]

BUILD = """
import json, sys
from superpod.recipes import build
from superpod.nemo2.validation.configured_job import job, job_from_partial
from superpod.collection.registry import find

seen = {}
for name in sys.argv[1:]:
    recipe = find(name)
    for nodes in recipe.nodes:
        partial = build(name, nodes)
        plugin = partial.trainer.plugins
        ends = [getattr(plugin, f"num_layers_at_{end}_in_bf16", 0) for end in ("start", "end")]
        planned = job_from_partial(partial, recipe).options.cp_comm
        seen[f"{name} {nodes}"] = {
            "cp_comm_type": partial.model.config.cp_comm_type,
            "planned": [planned, job(recipe, nodes).options.cp_comm],
            "bf16": [bool(plugin.first_last_layers_bf16), *ends],
        }
print("RESULT", json.dumps(seen))
"""
RECIPES = (
    *("gpt_oss_120b_sft_h100_bf16", "gpt_oss_20b_pretrain_h100_bf16", "mistral_7b_pretrain_h100_bf16"),
    *("llama3_8b_pretrain_h100_fp8cs", "nemotronh_8b_pretrain_h100_fp8cs", "nemotronh_8b_pretrain_h100_fp8ds"),
    "nemotron_nano_12b_v2_pretrain_h100_fp8bw",
)


@pytest.fixture(scope="module")
def seen():
    command = [sys.executable, "-W", "ignore", "-c", BUILD, *RECIPES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    sizes = json.loads(done.stdout.rpartition("RESULT")[2])
    assert {size.split()[0] for size in sizes} == set(RECIPES)
    return sizes


def test_cp_comm_type_reaches_megatron(seen):
    for name, size in seen.items():
        wanted = "a2a" if name.startswith(("gpt_oss", "mistral")) else None
        assert size["cp_comm_type"] == wanted, name
        assert size["planned"] == [wanted or "p2p"] * 2, name


def test_hybrids_keep_two_layers_at_each_end_in_bf16(seen):
    for name, size in seen.items():
        hybrid = name.startswith("nemotron") and "fp8ds" not in name
        assert size["bf16"] == ([True, 2, 2] if hybrid else [True, 1, 1] if "fp8cs" in name else [False, 0, 0]), name
