"""The reference tables: every row says where it is from and what was run; sources' habits are written into columns."""

import csv
import importlib.util
import sys

import pytest

from superpod.planner import hardware
from superpod.planner.tables import published
from tests.conftest import ROOT

REFERENCE = ROOT / "benchmarks" / "reference"
TABLES = {"memory": 314, "step_time": 1014, "nanotron": 1337, "unseen": 191, "since_fit": 11}


@pytest.fixture(scope="module")
def condense():
    path = ROOT / "benchmarks" / "condense.py"
    spec = importlib.util.spec_from_file_location("condense", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["condense"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def facts():
    return published.Facts(hardware.load(REFERENCE / "hardware.toml"))


@pytest.mark.parametrize("name", TABLES)
def test_every_row_has_a_source_and_is_read_as_it_stands(name, facts):
    with (REFERENCE / f"{name}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == TABLES[name]
    assert all(row["source"] and None not in row and None not in row.values() for row in rows)
    read, unsupported = {published.Row: 0}, []
    for row in rows:
        try:
            job = published.job(row, facts)
        except published.Unsupported as refused:
            unsupported.append(str(refused))
            continue
        except published.InconsistentRow:
            continue
        read[published.Row] += job.gpus > 0
    assert read[published.Row] > 0.95 * len(rows)
    known = ("deepseek_v4", "no GPU", "no model", "is not supported")
    assert [why for why in unsupported if not any(word in why for word in known)] == []


@pytest.mark.parametrize("name", ["memory", "step_time"])
def test_a_fifth_of_the_rows_is_held_out(name):
    with (REFERENCE / f"{name}.csv").open(newline="") as file:
        held = [row["held_out"] == "yes" for row in csv.DictReader(file)]
    assert 0.15 < sum(held) / len(held) < 0.25


CI = {"source": "x", "framework": "Megatron-LM CI", "model": "gpt", "layers": "12", "hidden": "512", "heads": "8",
      "seq": "1024", "gbs": "32", "mbs": "4", "tp": "1", "pp": "4", "flags": "attention-backend=unfused"}  # fmt: skip


def job(condense, facts, row):
    return published.job(condense.condense(row, kind="memory"), facts)


def test_vp1_of_a_ci_case_is_one_layer_a_stage(condense, facts):
    def layout(case):
        return job(condense, facts, {**CI, "case": case}).layout

    assert layout("gpt3_mcore_te_tp1_pp4_vp1").vp == 3
    assert layout("gpt3_mcore_te_tp1_pp4").vp is None
    uneven = layout("gpt3_mcore_te_tp1_pp4_vp1_uneven_pipeline")
    assert (uneven.vp, uneven.first_layers, uneven.last_layers) == (None, 2, 2)


def test_ci_runs_on_one_node_of_eight_without_a_distributed_optimizer(condense, facts):
    plain = job(condense, facts, CI)
    assert (plain.gpus, plain.layout.sharding, plain.options.hidden_dropout) == (8, "none", 0.1)
    assert not plain.options.grad_fusion
    sharded = job(condense, facts, {**CI, "flags": "use-distributed-optimizer=True; hidden-dropout=0.0"})
    assert (sharded.layout.sharding, sharded.options.hidden_dropout) == ("zero1", 0)


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"gpu": "b200"}, "b200"),
        ({"precision": "MXFP8"}, "gb200"),
        ({"framework": "Megatron-LM CI", "source": "x/golden_values_lts_dgxa100_dracooci.json"}, "a100-80gb"),
        ({"framework": "Megatron-LM CI", "source": "x/golden_values_dev_dgxh100_dgxc.json"}, "h100-80gb"),
        ({"gpu": "h100-96gb-500w"}, "h100_96gb"),
        ({}, "h100-80gb"),
    ],
)
def test_the_gpu_of_a_row(condense, facts, row, name):
    assert condense.gpu(row) == name
    assert facts.hardware.node(name).gpu.hbm_gb > 0


def test_models_as_their_sources_run_them(condense, facts):
    simumax = {"source": "x", "framework": "Megatron-LM 23e00ed0 + TE 2.11", "seq": "4096", "gpu": "b200"}
    assert job(condense, facts, {**simumax, "model": "llama31_405b", "layers": "4"}).model.kv_heads == 16
    assert job(condense, facts, {**simumax, "model": "deepseek_v3", "layers": "4"}).model.dense_first == 1
    mlperf = {"source": "x", "framework": "NVIDIA NeMo MLPerf v5.0", "precision": "FP8", "seq": "8192"}
    run = job(condense, facts, {**mlperf, "model": "llama31_405b"})
    assert (run.model.vocab, run.options.grads, run.options.fp8_params) == (32000, "bf16", True)


VTRAIN = {"source": "x", "release": "vTrain", "model": "gpt", "layers": "24", "hidden": "2048", "heads": "16",
          "vocab": "51200", "gpu": "a100-80gb", "precision": "fp16", "seq": "1024", "gbs": "16",
          "mbs": "1"}  # fmt: skip


@pytest.mark.parametrize(("tp", "vocab"), [(1, 50257), (2, 50256), (8, 50256)])
def test_vtrain_on_one_node_recomputes_nothing_and_pads_nothing(condense, facts, tp, vocab):
    run = job(condense, facts, {**VTRAIN, "gpus": "8", "tp": str(tp)})
    assert (run.layout.recompute, run.model.vocab, run.model.padded_vocab(tp)) == ("none", vocab, vocab)
    assert (run.layout.sp, run.options.framework) == (False, "deepspeed")


def test_vtrain_on_several_nodes_recomputes_all(condense, facts):
    run = job(condense, facts, {**VTRAIN, "gpus": "64", "tp": "8", "pp": "4"})
    assert (run.layout.recompute, run.model.vocab) == ("full", 51200)
