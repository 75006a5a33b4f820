"""The counts against Megatron's own models: NeMo's stock recipes, built for real on the meta device.

`recipes prove` does the same with every recipe of ours.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from superpod.planner import models
from superpod.planner.models import Split

OWN: dict[str, int] = {}
FIELDS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "first_layers": "num_layers_in_first_pipeline_stage",
    "last_layers": "num_layers_in_last_pipeline_stage",
    "embedding_as_layer": "account_for_embedding_in_pipeline_split",
    "loss_as_layer": "account_for_loss_in_pipeline_split",
}
BOTH = {"embedding_as_layer": True, "loss_as_layer": True}
CASES = [
    ("llama_embedding_1b", {"pp": 4}),  # before any Llama: NeMo cannot build it after one in the same process
    ("llama_embedding_3b", {"tp": 4, "pp": 4}),
    ("llama2_7b", {"tp": 2, "pp": 4, "vp": 2}),
    ("llama3_8b", OWN),
    ("llama3_8b", {"tp": 4, "pp": 2, "vp": 4}),
    ("llama3_70b", OWN),
    ("llama31_405b", OWN),
    ("llama31_405b", {"tp": 8, "pp": 8, "vp": 8, **BOTH}),
    ("llama31_405b", {"tp": 8, "pp": 8, "vp": 2, "first_layers": 18, "last_layers": 12}),
    ("llama32_1b", OWN),
    ("llama32_1b", {"tp": 2, "pp": 6, "vp": 3, **BOTH}),
    ("llama4_e128", {"tp": 4, "pp": 4, "vp": 3, "ep": 8, "etp": 2}),
    ("mistral_7b", {"tp": 4, "pp": 4}),
    ("mixtral_8x7b", OWN),
    ("mixtral_8x22b", OWN),
    ("mixtral_8x22b", {"tp": 2, "pp": 4, "ep": 4, "etp": 4}),
    ("gemma_7b", {"tp": 8, "pp": 2}),
    ("gemma2_9b", {"tp": 4, "pp": 2}),
    ("gemma3_1b", OWN),
    ("qwen25_7b", {"tp": 4, "pp": 2, "vp": 2}),
    ("qwen3_8b", {"tp": 2, "pp": 3}),
    ("qwen3_30b_a3b", OWN),
    ("qwen3_30b_a3b", {"tp": 2, "pp": 2, "ep": 8, "etp": 1}),
    ("qwen3_235b_a22b", OWN),
    ("qwen3_235b_a22b", {"tp": 2, "pp": 8, "vp": 4, "ep": 4, "etp": 1, **BOTH}),
    ("deepseek_v2_lite", {"pp": 3, "ep": 8, "etp": 1}),
    ("deepseek_v2", {"pp": 4, "vp": 3, "ep": 32, "etp": 1}),
    ("deepseek_v3", OWN),  # with multi-token prediction and uneven stages
    ("deepseek_v3", {"pp": 9, "ep": 32, "etp": 1, **BOTH}),
    ("nemotron4_340b", OWN),
    ("gpt3_175b", OWN),
    ("starcoder2_15b", OWN),
    ("phi3_mini_4k_instruct", {"tp": 4, "pp": 2}),
    ("starcoder_15b", {"pp": 4}),
    ("baichuan2_7b", {"tp": 2, "pp": 4, "vp": 2}),
    ("chatglm3_6b", {"tp": 2, "pp": 4}),
    ("qwen2_500m", {"pp": 3}),
    ("qwen2_1p5b", {"pp": 4}),
    ("qwen2_72b", {"tp": 4, "pp": 4, "vp": 5}),
    ("llama31_nemotron_70b", {"tp": 4, "pp": 4}),
    ("llama33_nemotron_super_49b", {"tp": 8, "pp": 4}),
    ("llama31_nemotron_ultra_253b", {"tp": 8, "pp": 9}),
    ("llama_reranker_1b", {"tp": 2, "pp": 4}),
]

BUILD = """
import importlib, json, math, sys
import superpod.rehearsal.entry  # before NeMo: Gemma 2 and 3 need its classes
from superpod.rehearsal import dry_build

def measure(recipe, vocab):
    s = recipe.trainer.strategy
    d = {key: getattr(s, name, None) for key, name in json.loads(sys.argv[1]).items()}
    tp, pp, cp = d["tp"] or 1, d["pp"] or 1, s.context_parallel_size or 1
    unit = math.lcm(tp * cp, (d["ep"] or 1) * (d["etp"] or tp))
    built = {k: dry_build(recipe, k * unit, unit * pp, vocab_size=vocab) for k in sorted({0, pp // 2, pp - 1})}
    return {"degrees": d, "mtp": getattr(recipe.model.config, "mtp_num_layers", None) or 0, "stages": built}

def stock(name, degrees, vocab):
    recipes = importlib.import_module("nemo.collections.llm.recipes." + name)
    sizes = {"name": "x", "dir": "/nowhere", "num_nodes": 1, "num_gpus_per_node": 8}
    try:
        recipe = recipes.pretrain_recipe(**sizes)
    except (AttributeError, NotImplementedError):  # what is only tuned
        recipe = recipes.finetune_recipe(**sizes, peft_scheme=None)
    if degrees:
        strategy = recipe.trainer.strategy
        for key, field in json.loads(sys.argv[1]).items():
            setattr(strategy, field, degrees.get(key))
        for key in ("tp", "pp", "ep"):
            setattr(strategy, json.loads(sys.argv[1])[key], degrees.get(key, 1))
        for key in ("embedding_as_layer", "loss_as_layer"):
            setattr(strategy, json.loads(sys.argv[1])[key], degrees.get(key, False))
        strategy.sequence_parallel = degrees.get("tp", 1) > 1
    return measure(recipe, vocab)

out = []
for name, degrees, vocab in json.load(sys.stdin):
    out.append(stock(name, degrees, vocab))
print("RESULT" + json.dumps(out))
"""


@pytest.mark.nemo
@pytest.mark.slow
def test_counts_equal_the_real_models_to_the_parameter():
    cases = [(name, degrees, vocab_of(name)) for name, degrees in CASES]
    command = [sys.executable, "-W", "ignore", "-c", BUILD, json.dumps(FIELDS)]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.rpartition("RESULT")[2])
    compared = 0
    for (name, _, _), result in zip(cases, results, strict=True):
        model = models.find(name).replace(mtp_layers=result["mtp"])
        given = {key: value for key, value in result["degrees"].items() if value is not None}
        split = Split(**given)
        for stage, real in result["stages"].items():
            counted = [chunk.total for chunk in model.chunk_parameters(split, int(stage))]
            assert counted == real, (name, split, stage)
            compared += 1
    assert compared > 100
    print(f"{compared} ranks of {len(cases)} recipes and layouts, none differs")


def vocab_of(name):
    """The vocabulary to build with; None where NeMo's configuration sets it."""
    model = models.find(name)
    return model.vocab if model.vocab_divisible_by > 1 else None


# Models that need a GPU's packages: NeMo's class, tp, pp, rank, and the share by which the count may be off.
STANDING_IN = {
    "mamba2_130m": ("BaseMambaConfig130M", 1, 1, 0, 0),
    "mamba2_370m": ("BaseMambaConfig370M", 1, 2, 1, 0),
    "mamba2_780m": ("BaseMambaConfig780M", 1, 1, 0, 0),
    "mamba2_1_3b": ("BaseMambaConfig1_3B", 1, 4, 2, 0),
    "mamba2_2_7b": ("BaseMambaConfig2_7B", 1, 1, 0, 0),
    "mamba2_8b": ("NVIDIAMambaConfig8B", 4, 2, 0, 0),
    "mamba2_hybrid_8b": ("NVIDIAMambaHybridConfig8B", 8, 4, 9, 0),
    "nemotronh_8b": ("NemotronHConfig8B", 8, 2, 8, 0),
    "nemotronh_56b": ("NemotronHConfig56B", 8, 2, 15, 0),
    "nemotron_nano_9b_v2": ("NemotronNano9Bv2", 4, 4, 5, 0),
    "t5_220m": ("T5Config220M", 1, 1, 0, 2e-4),
    "t5_3b": ("T5Config3B", 2, 1, 0, 2e-4),
    "t5_11b": ("T5Config11B", 8, 1, 0, 2e-4),
    "hyena_1b": ("Hyena1bConfig", 1, 1, 0, 5e-4),
    "hyena_7b": ("Hyena7bConfig", 4, 2, 0, 5e-4),
    "hyena_40b": ("Hyena40bConfig", 8, 5, 8, 5e-4),
}


@pytest.mark.slow
@pytest.mark.nemo
def test_counts_of_what_needs_a_gpu_equal_the_real_models_built_with_stand_ins():
    cases = {of: [*degrees, models.find(name).vocab] for name, (of, *degrees, _) in STANDING_IN.items()}
    command = [sys.executable, "-W", "ignore", Path(__file__).with_name("stand_ins.py"), json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    real = json.loads(done.stdout.rpartition("RESULT")[2])
    for name, (of, tp, pp, rank, off) in STANDING_IN.items():
        counted = models.find(name).parameters(Split(tp=tp, pp=pp), rank // tp).total
        assert counted == pytest.approx(real[of], rel=off, abs=0), name
