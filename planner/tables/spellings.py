"""What a source of published rows leaves unsaid because all its runs share it: read in its launch scripts, cited here.

`published.py` fills a row's blanks; this is its table of sources. Nothing here looks at a row's id or its figures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from superpod.planner import hardware, megatron_args, models
from superpod.planner.hardware import Node
from superpod.planner.models import ModelShape

Row = Mapping[str, str]

SIMUMAX = "Megatron-LM 23e00ed0"
"""MooreThreads/SimuMax docs/b200: runs of simu_tools/megatron_scripts (run_pretrain_llama3.sh, _deepseekv2.sh)."""
CI = "Megatron-LM CI"
"""NVIDIA/Megatron-LM tests/functional_tests/test_cases: each case's model_config.yaml, on one node of 8 GPUs."""
MLPERF = "MLPerf"

CI_ARGUMENTS = {
    "": {"no-gradient-accumulation-fusion": "true", "deterministic-mode": "true"},
    "multi-latent-attention": {"q-lora-rank": "1536", "kv-lora-rank": "512", "moe-layer-freq": "([0]*1+[1]*15)"},
    "moe-ffn-hidden-size": {"moe-grouped-gemm": "true"},
}
"""Arguments of CI cases that rows do not list: of all, and of those whose flags have the key."""

CI_CASES = {
    r"_uneven_pipeline": {"decoder-first-pipeline-num-layers": "2", "decoder-last-pipeline-num-layers": "2"},
    r"_vp1(?!.*_uneven_pipeline)": {"num-layers-per-virtual-pipeline-stage": "1"},
    r"_tunable_overlap": {"microbatch-group-size-per-virtual-pipeline-stage": "5"},
    r"_multi_dist_optimizer_instances": {"num-distributed-optimizer-instances": "2"},
    r"_8experts": {"moe-grouped-gemm": "true"},
    r"_attn_cudagraph": {"enable-cuda-graph": "true"},
    r"_qk_layernorm": {"qk-layernorm": "true"},
    r"^deepseek_proxy": {"q-lora-rank": "256", "kv-lora-rank": "128", "moe-layer-freq": "([0]*3+[1]*5)"},
    r"^(?!.*experts).*nondeterministic|cross_entropy_loss_fusion|memory_speed": {"deterministic-mode": "false"},
}
"""Arguments that the names of CI cases stand for; `vp1` counts layers of a virtual stage, not stages."""


def node(row: Row) -> Node:
    """The node of a row's GPU. Where it names none: CI's runs for long-term support are on DGX A100, MXFP8 is
    Blackwell's, the rest are H100. torchtitan's H100s are not the usual ones: 96 GB at 500 W (its benchmark pages).

    Raises:
        UserError: when there is no such GPU.
    """
    name = (row.get("gpu") or "").strip() or _unnamed(row)
    special = name.startswith("h100-96gb") or ("llama3_h100_202412" in (row.get("source") or "") and "h100" in name)
    if not special:
        return hardware.node(name)
    node_h100 = hardware.node("h100")
    return node_h100.replace(gpu=node_h100.gpu.replace(name="h100_96gb", hbm_gb=96, hbm_usable_gib=95.0, power_w=500))


def _unnamed(row: Row) -> str:
    if CI not in (row.get("framework") or ""):
        return "gb200" if re.search(r"MXFP8|fp8-mx|nvfp4", row.get("precision") or "", re.I) else "h100"
    golden = (row.get("source") or "").rsplit("/", 1)[-1]
    return "a100" if "a100" in golden or "lts" in golden else "h100"


def gpus(row: Row) -> int | None:
    """The number of GPUs of a row that names none."""
    return 8 if CI in (row.get("framework") or "") else None


def arguments(row: Row) -> dict[str, str]:
    """Megatron-LM arguments of a row, with those that its source always gives; none for rows without flags.

    Runs on the cluster dracooci are older than the cases' choice of an attention backend: flash attention was off.
    """
    flags = megatron_args.parse(row.get("flags") or "")
    if CI not in (row.get("framework") or ""):
        return flags
    if row.get("ffn"):
        flags["ffn-hidden-size"] = row["ffn"]
    implied = {k: v for key, more in CI_ARGUMENTS.items() if not key or key in flags for k, v in more.items()}
    for pattern, more in CI_CASES.items():
        if re.search(pattern, row.get("case") or ""):
            implied |= more
    if not re.search(r"dracooci", row.get("source") or ""):
        return implied | flags
    return implied | {"attention-backend": "unfused"} | flags


def variant(row: Row, model: ModelShape) -> ModelShape:
    """The model as the source runs it, where it differs from the published one.

    SimuMax's Llama 405B has 16 key-value heads (run_pretrain_llama3.sh, num_query_groups), and its DeepSeeks one dense
    layer (run_pretrain_deepseekv2.sh, MOE_LAYER_FREQ). MLPerf trains Llama 405B with Mixtral's tokenizer of 32,000
    (mlcommons/training large_language_model_pretraining/nemo).
    """
    if _mlperf(row):
        return model.replace(vocab=32000) if model.hidden == 16384 else model
    if SIMUMAX not in (row.get("framework") or ""):
        return model
    if model.dense_first:
        return model.replace(dense_first=1)
    return model.replace(kv_heads=16) if model.hidden == 16384 else model


def options(row: Row) -> dict[str, Any]:
    """Fields of `Options` that a source sets."""
    framework = row.get("framework") or ""
    if SIMUMAX in framework:
        # --cp-comm-type a2a, fused loss of Transformer Engine; experts padded to a capacity factor of 1
        return {"cp_comm": "a2a", "loss_impl": "te", "capacity": 1.0}
    if CI in framework:
        return {"release": "mcore 0.11" if "dracooci" in (row.get("source") or "") else "mcore main"}
    if _mlperf(row):
        # training_results_v5.0, NVIDIA's llama31_405b and llama2_70b_lora: FP8 parameters, gradients reduced in BF16,
        # LoRA of rank 16 on attention only
        lora = {"lora_rank": 16, "lora_dropout": 0.1, "lora_targets": ("linear_qkv", "linear_proj")}
        return {"fp8_params": True, "grads": "bf16", "loss_impl": "te", **lora}
    if "sail-sg" in framework:
        # Megatron's dropout. arXiv:2401.10241, of 2023: no flash attention. 2411.05288: 16 bytes a parameter (what the
        # vocabulary adds in its Table 5), so gradients in BF16; 18 in its artifact
        source = row.get("source") or ""
        more = {"attention": "unfused"} if "2401.10241" in source else {}
        more |= {"grads": "bf16"} if "2411.05288" in source else {}
        return {"fused_loss": False, "hidden_dropout": 0.1, "attention_dropout": 0.1, **more}
    if "Megatron-Bridge" in framework + (row.get("source") or "") or re.match(r"NeMo|tag v", row.get("release") or ""):
        # scripts/performance of NeMo and Megatron-Bridge: fp8_param_gather, grad_reduce_in_fp32 off, the loss of
        # Transformer Engine (set_primary_perf_configs), LoRA of queries, keys and values only (llama3_70b_lora_config)
        return {"fp8_params": True, "grads": "bf16", "loss_impl": "te", "lora_targets": ("linear_qkv",)}
    if (row.get("release") or "") in ("SC21", "Korthikanti22"):  # Megatron-LM of 2021 and 2022, before flash attention
        unfused = {"attention": "unfused", "impl": "local", "fused_loss": False, "overlap_tp": False}
        dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
        return {**unfused, **dropout, "overlap_grads": False, "overlap_params": False}
    return {}


def release(row: Row) -> str:
    """A row's release as `Options.release` has it; verification cards are of runs that nobody tuned."""
    text = (row.get("release") or "").strip()
    if "MLPerf" in text:
        return f"era {text.lower()}"
    if text in ("SC21", "Korthikanti22"):
        return "era 2021"
    number = re.search(r"(?:NeMo|container|tag v)\s*(\d\d\.\d\d)", text)
    name = f"NeMo {number[1]}" if number else text
    fine_tunes = (row.get("task") or "pretrain").strip().lower() != "pretrain"
    return f"{name}, functional" if "verification card" in text and fine_tunes else name


SC21_BATCHES = {
    **{24: (16, 1), 30: (16, 1), 36: (16, 1), 40: (8, 1), 48: (4, 1)},
    **{60: (2, 3), 80: (2, 2), 96: (1, 2), 105: (1, 3), 128: (1, 1)},
}
"""Micro-batch and chunks per stage of arXiv:2104.04473 Table 1, by its layers: Megatron-LM examples/sc21."""
GROK_LAYERS = ((8, 2), (16, 4), (32, 4), (64, 8), (128, 16), (256, 32))
"""dgxc-benchmarking grok1/README_314b.md cuts the model on few GPUs: (at most so many GPUs, layers); above, all 64."""


def fp8_kind(row: Row, has_mxfp8: bool) -> str:
    """Which FP8 a row that only says `fp8` means; the notes tell the two columns of NeMo 25.09's tables apart.

    Those in parentheses are scaled by blocks: MXFP8 on Blackwell, 128 x 128 on Hopper. Before mid-2025 NeMo scaled by
    delayed maxima, as MLPerf still does; later by the current one.
    """
    release = row.get("release") or ""
    if "in parentheses" in (row.get("notes") or ""):
        return "mxfp8" if has_mxfp8 else "fp8bw"
    late = re.search(r"NeMo 2(5\.(0[4-9]|1)|6)|container 2[56]", release)
    return "fp8cs" if late else "fp8ds"


def is_fsdp2(row: Row) -> bool:
    """Whether a row is of torchtitan or NeMo Automodel: PyTorch's FSDP2, which shards everything."""
    text = (row.get("framework") or "") + (row.get("source") or "") + (row.get("unit") or "")
    return "torchtitan" in text or "Automodel" in text


def is_vtrain_node(row: Row) -> bool:
    """Whether a row is of vTrain's single-node runs: nothing recomputed, and a vocabulary that is not padded.

    Their configurations say `use_checkpoint` for all stages but the last, but the last one's layers take as long as
    the others'. The head's time is that of 50,257 rows in tp parts (src/model/gpt_modeling.py): at TP 1, where that
    is an odd number, 2.5 to 4.7 times as long as at TP 2.
    """
    return row.get("release") == "vTrain" and _size(row, "gpus") <= 8


def _mlperf(row: Row) -> bool:
    return MLPERF in (row.get("framework") or "") + (row.get("release") or "")


def _size(row: Row, key: str) -> int:
    """A field's number, or 0 where it is none."""
    text = (row.get(key) or "").strip()
    return int(text) if text.isascii() and text.isdigit() else 0


def blanks(row: Row) -> Mapping[str, int | str]:
    """Fields of a row that leaves them blank. MLPerf's Llama 70B LoRA runs 8,192 tokens over cp 8."""
    if _mlperf(row) and row.get("task") == "lora":
        return {"seq": 8192, "cp": 8}
    if "torchtitan" in (row.get("source") or ""):
        # benchmarks/llama3_h100_202412_torchtitan.md: 8,192 tokens; train_configs: selective recomputation by operation
        return {"seq": 8192, "recompute": "selective AC"}
    if row.get("release") == "SC21":
        mbs, vp = SC21_BATCHES.get(_size(row, "layers"), (1, 1))
        return {"mbs": mbs, "vp": vp}
    release = row.get("release") or ""
    if release == "vTrain" and not is_vtrain_node(row):
        return {"recompute": "full"}
    if release.startswith("NeMo 24.07") and row.get("task") != "pretrain" and _size(row, "pp") > 1:
        # the table of fine-tuning has no column for it; that of pre-training has one layer a chunk
        return {"vp": models.find(row["model"]).layers // _size(row, "pp")}
    if re.search(r"NeMo 2(5\.(09|1)|6)|verification card", release) or "Megatron-Bridge" in (row.get("source") or ""):
        # Megatron-Bridge, scripts/performance/configs: expert_tensor_parallel_size=1 in every preset; Nemotron 3's
        # sequences are of 8,192 tokens
        return {"etp": 1} | ({"seq": 8192} if (row.get("model") or "").startswith("nemotron3") else {})
    dgxc = "dgxc" in (row.get("source") or "")
    if dgxc and row.get("model") == "nemotron4_340b" and _size(row, "pp") > 1:
        return {"vp": 12}  # the recipe's; a README of one release leaves it out
    if dgxc and row.get("model") == "grok1_314b" and "h100" in (row.get("gpu") or ""):
        return {"layers": next((n for gpus, n in GROK_LAYERS if _size(row, "gpus") <= gpus), 64)}
    if "2401.10241" in (row.get("source") or ""):
        pp, layers = int(row["pp"]), int(row["layers"])
        return {"vp": (layers + 2) // pp} if "interleaved" in (row.get("schedule") or "") else {}
    return {}
