"""What published sources leave unsaid, filled in by their own launch scripts."""

import pytest

from superpod.planner import memory
from superpod.planner.tables import published, spellings

CI = {"framework": "Megatron-LM CI", "model": "gpt", "layers": "12", "hidden": "512", "heads": "8", "seq": "1024",
      "gbs": "32", "mbs": "4", "tp": "1", "pp": "4", "flags": "attention-backend=unfused"}  # fmt: skip


def test_vp1_of_a_ci_case_is_one_layer_a_stage():
    assert published.job({**CI, "case": "gpt3_mcore_te_tp1_pp4_vp1"}).layout.vp == 3
    assert published.job({**CI, "case": "gpt3_mcore_te_tp1_pp4"}).layout.vp is None
    uneven = published.job({**CI, "case": "gpt3_mcore_te_tp1_pp4_vp1_uneven_pipeline"}).layout
    assert (uneven.vp, uneven.first_layers, uneven.last_layers) == (None, 2, 2)


def test_ci_runs_on_one_node_of_eight_without_a_distributed_optimizer():
    job = published.job(CI)
    assert (job.gpus, job.layout.sharding, job.options.hidden_dropout) == (8, "none", 0.1)
    assert not job.options.grad_fusion
    sharded = published.job({**CI, "flags": "use-distributed-optimizer=True; hidden-dropout=0.0"})
    assert (sharded.layout.sharding, sharded.options.hidden_dropout) == ("zero1", 0)


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"gpu": "b200"}, "b200"),
        ({"precision": "MXFP8"}, "gb200"),
        ({"framework": "Megatron-LM CI", "source": "x/golden_values_lts_dgxa100_dracooci.json"}, "a100"),
        ({"framework": "Megatron-LM CI", "source": "x/golden_values_dev_dgxh100_dgxc.json"}, "h100"),
        ({"gpu": "h100-96gb-500w"}, "h100_96gb"),
        ({}, "h100"),
    ],
)
def test_the_gpu_of_a_row(row, name):
    assert spellings.node(row).gpu.name == name


def test_models_as_their_sources_run_them():
    simumax = {"framework": "Megatron-LM 23e00ed0 + TE 2.11", "seq": "4096", "gpu": "b200"}
    assert published.job({**simumax, "model": "llama31_405b", "layers": "4"}).model.kv_heads == 16
    assert published.job({**simumax, "model": "deepseek_v3", "layers": "4"}).model.dense_first == 1
    mlperf = {"framework": "NVIDIA NeMo MLPerf v5.0", "model": "llama31_405b", "precision": "FP8", "seq": "8192"}
    job = published.job(mlperf)
    assert (job.model.vocab, job.options.grads, job.options.fp8_params) == (32000, "bf16", True)


def test_a_tuned_run_recomputes_what_does_not_fit_and_no_more():
    row = {"release": "NeMo 26.02", "model": "deepseek_v3", "gpu": "gb200", "gpus": "256", "precision": "fp8-mx",
           "seq": "4096", "gbs": "2048", "mbs": "1", "tp": "1", "pp": "4", "vp": "4", "ep": "64"}  # fmt: skip
    tuned = published.job(row)
    assert memory.verdict(tuned) == "ok"
    plain = tuned.replace(layout=tuned.layout.replace(recompute="none"))
    assert tuned.layout.recompute == ("none" if memory.verdict(plain) == "ok" else "selective")
    dense = published.job({**row, "model": "llama3_70b", "ep": "1", "pp": "8", "tp": "4", "precision": "bf16"})
    assert dense.layout.recompute == "none"
    stated = published.job({**row, "recompute": "full"})
    assert stated.layout.recompute == "full"


VTRAIN = {"release": "vTrain", "model": "gpt", "layers": "24", "hidden": "2048", "heads": "16", "vocab": "51200",
          "gpu": "a100-80gb", "precision": "fp16", "seq": "1024", "gbs": "16", "mbs": "1"}  # fmt: skip


@pytest.mark.parametrize(("tp", "vocab"), [(1, 50257), (2, 50256), (8, 50256)])
def test_vtrain_on_one_node_recomputes_nothing_and_pads_nothing(tp, vocab):
    job = published.job({**VTRAIN, "gpus": "8", "tp": str(tp)})
    assert (job.layout.recompute, job.model.vocab, job.model.padded_vocab(tp)) == ("none", vocab, vocab)


def test_vtrain_on_several_nodes_recomputes_all():
    job = published.job({**VTRAIN, "gpus": "64", "tp": "8", "pp": "4"})
    assert (job.layout.recompute, job.model.vocab) == ("full", 51200)
