import numpy as np
import pytest

from superpod.planner import models
from superpod.planner.kernels.fp8_shapes import REQUIREMENTS, Weight, tokens_misfit, weight_misfits, weights
from superpod.planner.models import counts

KINDS = ("fp8ds", "fp8cs", "fp8bw", "mxfp8")

# tests/pytorch/test_sanity.py, model_configs and is_fp8_supported (repository NVIDIA/TransformerEngine, read at the
# version with `ModelConfig(12, 2048, 2, 768, 12)`): name, hidden, tokens, runs in FP8. All four recipes run on each.
SANITY = (("126m", 768, 4096, True), ("small", 64, 64, True), ("weird", 69, 111, False), ("large", 512, 256, True))

# tests/pytorch/test_float8_blockwise_gemm_exact.py at 03328ccb: tokens, columns, rows of
# test_cublas_gemm_fp8_blockwise_shape_varying and ..._columnwise; all run, those that are no multiple of 128 as well.
BLOCKWISE = (
    *((128, 128, 128), (256, 128, 256), (320, 128, 336), (320, 64, 336), (256, 256, 256), (320, 256, 336)),
    *((1024, 4096, 1024), (16, 128, 128), (4096, 128, 4096)),
)

# tests/pytorch/test_numerics.py, _test_grouped_linear_accuracy and _test_padding_grouped_linear_accuracy: tokens of an
# expert come in steps of 16, of 32 with MXFP8; Megatron-Core 0.15.3 pads to the same (fp8_utils.py:107-112).
SPLITS = {"fp8ds": 16, "fp8cs": 16, "fp8bw": 16, "mxfp8": 32}

# tests/pytorch/distributed/test_comm_gemm_overlap.py: SEQ_LENGTH 1024, BATCH_SIZE 2, NUM_HEADS 16 x HEAD_DIM 48 = 768,
# TP over 2 GPUs; FP8 and MXFP8 run. Blockwise gathers blocks of 128, which these have as well.
OVERLAP = (768, 2048, 2)

# tests/pytorch/test_float8blockwisetensor.py at 02c6bd29: [256, 512] and [250, 500]; only the first can be gathered in
# FP8, by is_quantizable of each quantizer (tensor/float8_blockwise_tensor.py:203-211, mxfp8_tensor.py:78-86).
GATHERED = ((256, 512, True), (250, 500, False))

CASES = [
    *(
        (f"test_sanity.py::{name}", kind, 3 * hidden, hidden, tokens, 1, ok)
        for name, hidden, tokens, ok in SANITY
        for kind in KINDS
    ),
    *((f"test_float8_blockwise_gemm_exact.py::{m}-{k}-{n}", "fp8bw", n, k, m, 1, True) for m, k, n in BLOCKWISE),
    *((f"test_numerics.py::grouped-{step}", kind, 768, 768, step, 1, True) for kind, step in SPLITS.items()),
    *((f"test_numerics.py::grouped-{step // 2}", kind, 768, 768, step // 2, 1, False) for kind, step in SPLITS.items()),
    *(("test_comm_gemm_overlap.py::fp8", kind, OVERLAP[0], OVERLAP[0], OVERLAP[1], OVERLAP[2], True) for kind in KINDS),
    *(
        (f"test_float8blockwisetensor.py::{rows}-{columns}", kind, 1024, columns, 2 * rows, 2, ok)
        for rows, columns, ok in GATHERED
        for kind in ("fp8bw", "mxfp8")
    ),
]


@pytest.mark.parametrize(("test", "kind", "rows", "columns", "tokens", "tp", "fits"), CASES)
def test_a_shape_of_transformer_engines_tests_fits_where_it_runs(test, kind, rows, columns, tokens, tp, fits):
    steps, sp = REQUIREMENTS[kind], tp > 1
    odd = weight_misfits(steps, Weight(test, rows, columns, True), sp) or tokens_misfit(steps, tokens, tp, sp)
    assert bool(odd) != fits


def test_there_are_40_of_them():
    assert len(CASES) >= 40


@pytest.mark.parametrize(
    ("model", "precision", "tp", "broken"),
    [
        ("nemotronh_4b", "mxfp8", 1, ["in_proj"]),  # 16,496 rows
        ("nemotronh_4b", "fp8cs", 1, []),
        ("nemotronh_4b", "fp8cs", 2, ["in_proj"]),  # 8,248 rows
        ("nemotronh_8b", "fp8cs", 2, []),
        ("gpt_oss_20b", "fp8bw", 1, []),  # 2,880 has no whole blocks, and only what is gathered needs them
        ("gpt_oss_20b", "fp8bw", 2, ["linear_qkv"]),
        ("gpt_oss_20b", "mxfp8", 2, []),
        ("qwen2_72b", "fp8bw", 8, []),  # 29,568 / 8 = 3,696 = 28.9 blocks, whose scales are padded
        ("llama3_8b", "mxfp8", 8, []),
        ("deepseek_v3", "mxfp8", 1, []),
    ],
)
def test_weights_that_break_what_fp8_demands(model, precision, tp, broken):
    odd = [w.name for w in weights(models.find(model), tp) if weight_misfits(REQUIREMENTS[precision], w, tp > 1)]
    assert odd == broken


@pytest.mark.parametrize(
    "name", ["llama3_8b", "deepseek_v3", "nemotronh_8b", "mixtral_8x7b", "deepseek_v2_lite", "gpt3_175b"]
)
@pytest.mark.parametrize("tp", [1, 2])
def test_the_weights_are_those_that_the_planner_counts(name, tp):
    m = models.find(name).replace(bias=False, qkv_bias=False)
    per_kind = {kind: counts.block_parameters(m, kind, tp, 1, tp) for kind in m.kinds}
    counted = sum(p.total - p.norms - p.router for p in per_kind.values()) + (
        2 * m.hidden * m.hidden // tp if m.mtp_layers else 0
    )
    counted -= sum(counts.elementwise(m, kind, tp) for kind in m.kinds)
    copies = {name: m.experts for name in ("experts.linear_fc1", "experts.linear_fc2")}
    assert sum(w.rows * w.columns * copies.get(w.name, 1) for w in weights(m, tp, tp)) == counted


def test_many_layouts_at_once():
    tp = np.array([1, 2, 4])
    (in_proj,) = (w for w in weights(models.find("nemotronh_4b"), tp) if w.name == "in_proj")
    assert np.asarray(weight_misfits(REQUIREMENTS["fp8cs"], in_proj, tp > 1)).tolist() == [False, True, True]
    assert np.asarray(tokens_misfit(REQUIREMENTS["fp8bw"], 512, tp, tp > 1)).tolist() == [False, False, False]
    assert np.asarray(tokens_misfit(REQUIREMENTS["fp8bw"], 256, tp, tp > 1)).tolist() == [False, False, True]
