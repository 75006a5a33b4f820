"""Raw tables of published figures as those of benchmarks/reference: `python benchmarks/condense.py RAW.csv OUT.csv`.

A raw table has what its sources print. What a source leaves unsaid because all its runs share it stands in its launch
scripts, cited here; this writes it into the columns that `recipes predict` reads, so that a table says by itself what
was run. Nothing here looks at a row's id or its figures. `held_out` marks the fifth of the configurations that nothing
is fitted on: it follows from what the source prints, by hash, and so stays as it is; `twin` = neither (held_out.py).
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import held_out

from superpod.planner import hardware, models
from superpod.planner.formats import megatron_args
from superpod.planner.planned_job import Options, PlannedJob
from superpod.planner.tables import published

Row = Mapping[str, str]

SIMUMAX = "Megatron-LM 23e00ed0"
"""MooreThreads/SimuMax docs/b200: runs of simu_tools/megatron_scripts (run_pretrain_llama3.sh, _deepseekv2.sh)."""
CI = "Megatron-LM CI"
"""NVIDIA/Megatron-LM tests/functional_tests/test_cases: each case's model_config.yaml, on one node of 8 GPUs."""

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

SC21_BATCHES = {
    **{24: (16, 1), 30: (16, 1), 36: (16, 1), 40: (8, 1), 48: (4, 1)},
    **{60: (2, 3), 80: (2, 2), 96: (1, 2), 105: (1, 3), 128: (1, 1)},
}
"""Micro-batch and chunks per stage of arXiv:2104.04473 Table 1, by its layers: Megatron-LM examples/sc21."""
GROK_LAYERS = ((8, 2), (16, 4), (32, 4), (64, 8), (128, 16), (256, 32))
"""dgxc-benchmarking grok1/README_314b.md cuts the model on few GPUs: (at most so many GPUs, layers); above, all 64."""

PRESETS = Path(__file__).parent / "reference" / "presets.csv"
"""What a run's own scripts or log say and its table does not print: presets of Megatron-Bridge's
scripts/performance/configs and configurations of MLPerf's submissions. That line fits whose patterns match a row first;
`run` is looked for in its source, and is blank for Megatron-Bridge's tables. `ran`: columns that its table prints of
another run's precision, or not at all."""
PRESET_FOR = ("task", "model", "gpu", "precision", "mbs", "pp")
DROPPED = ("case", "schedule", "model_as_printed", "tflops_per_gpu", "size", "zero")
"""Columns of raw tables that nothing reads once a row is condensed."""
NANOTRON = "nanotron"


def condense(row: Row, *, kind: str = "time") -> dict[str, str]:
    """A raw row in the columns of benchmarks/reference. `kind`: the table that it is of, of `held_out.BY`."""
    row = {key: (value or "").strip() for key, value in row.items()}
    drawn = "yes" if held_out.drawn(row, kind) else ""
    if NANOTRON in row.get("release", ""):
        return _of_job(row, published.job(row))
    if "in parentheses" in row.get("notes", "") and hardware.precision(row["precision"]) == "fp8":
        # NeMo 25.09's tables have two columns: those in parentheses are scaled by blocks, on Blackwell MXFP8
        row["precision"] = "mxfp8" if "mxfp8" in hardware.node(gpu(row)).gpu.precisions else "fp8bw"
    blanks = {key: str(value) for key, value in usual(row).items()}
    whole = {**row, **{key: row.get(key) or value for key, value in blanks.items()}, **_shape(row)}
    known = preset(row)
    whole |= dict(word.split("=") for word in known["ran"].split())
    whole["gpu"], whole["gpus"] = gpu(row), row.get("gpus") or ("8" if is_ci(row) else "")
    whole["options"] = _last_of_each(options_text(_trained_in(row, options(row))), known["options"])
    if is_ci(row):
        whole["release"] = "mcore 0.11" if "dracooci" in row["source"] else "mcore main"
    if row.get("flags") or is_ci(row):
        whole["flags"] = "; ".join(f"{name}={value}" for name, value in arguments(row).items())
    whole["recompute"], whole["layout"] = recomputed(row, whole.get("recompute", ""))
    # a verification card names what its recipe recomputes, not what its run did
    whole["recompute"] = known["recompute"] or whole["recompute"]
    if is_fsdp2(row):
        whole["fsdp"] = row.get("fsdp") or "1"
    return {**whole, "held_out": drawn}


def has_images(row: Row) -> bool:
    """Whether a row trains a vision tower beside the language model, which the planner does not know: by its recipe's
    name, or of a model of which Megatron-Bridge has no other recipe."""
    text = " ".join(row.get(key) or "" for key in ("notes", "outcome", "source"))
    return bool(re.search(r"_vl_|model_verification_cards/(gemma-4|qwen3\.8)", text))


def contradicts(job: PlannedJob) -> bool:
    """Whether a row's numbers cannot all be true: its batch is less than a micro-batch a rank."""
    return job.layout.gbs < job.layout.mbs * job.dp


def is_ci(row: Row) -> bool:
    """Whether a row is one of Megatron-LM's functional tests."""
    return CI in (row.get("framework") or "")


def is_fsdp2(row: Row) -> bool:
    """Whether a row is of torchtitan or NeMo Automodel: PyTorch's FSDP2, which shards everything."""
    text = (row.get("framework") or "") + (row.get("source") or "") + (row.get("unit") or "")
    return "torchtitan" in text or "Automodel" in text


def gpu(row: Row) -> str:
    """The GPU of a row. Where it names none: CI's runs for long-term support are on DGX A100, MXFP8 is Blackwell's, the
    rest are H100. torchtitan's H100s are not the usual ones: 96 GB at 500 W (its benchmark pages), in hardware.toml.
    """
    name = row.get("gpu") or _unnamed(row)
    special = name.startswith("h100-96gb") or ("llama3_h100_202412" in (row.get("source") or "") and "h100" in name)
    return "h100_96gb" if special else name


def _unnamed(row: Row) -> str:
    if not is_ci(row):
        return "gb200" if re.search(r"MXFP8|fp8-mx|nvfp4", row.get("precision") or "", re.I) else "h100-80gb"
    golden = (row.get("source") or "").rsplit("/", 1)[-1]
    return "a100-80gb" if "a100" in golden or "lts" in golden else "h100-80gb"


def arguments(row: Row) -> dict[str, str]:
    """Megatron-LM arguments of a row, with those that its source always gives.

    Runs on the cluster dracooci are older than the cases' choice of an attention backend: flash attention was off.
    """
    flags = megatron_args.parse(row.get("flags") or "")
    if not is_ci(row):
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


def _shape(row: Row) -> dict[str, str]:
    """The model as the source runs it, where it differs from the published one; else what the row prints.

    SimuMax's Llama 405B has 16 key-value heads (run_pretrain_llama3.sh, num_query_groups), and its DeepSeeks one dense
    layer (run_pretrain_deepseekv2.sh, MOE_LAYER_FREQ). MLPerf trains Llama 405B with Mixtral's tokenizer of 32,000
    (mlcommons/training large_language_model_pretraining/nemo). vTrain's nodes do not pad the vocabulary: the head's
    time is that of 50,257 rows in tp parts (src/model/gpt_modeling.py).
    """
    if row["model"] in ("gpt", "moe"):
        if not is_vtrain_node(row):
            return {}
        tp = _size(row, "tp") or 1
        return {"vocab": str(50257 // tp * tp), "vocab_divisible_by": "1"}
    printed: dict[str, str] = dict.fromkeys(
        ("hidden", "ffn", "heads", "kv_heads", "vocab"), ""
    )  # the named model's own
    if row["model"] not in models.names():
        return printed
    model = models.find(row["model"])
    if _mlperf(row) and model.hidden == 16384:
        return printed | {"vocab": "32000"}
    if SIMUMAX not in row.get("framework", ""):
        return printed
    if model.dense_first:
        return printed | {"dense_first": "1"}
    return printed | ({"kv_heads": "16"} if model.hidden == 16384 else {})


def options(row: Row) -> dict[str, Any]:
    """Fields of `Options` that a source sets."""
    framework, release = row.get("framework") or "", row.get("release") or ""
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    unfused = {"attention": "unfused", "impl": "local", "fused_loss": False, "overlap_tp": False}
    serial = {"overlap_grads": False, "overlap_params": False}
    if release == "vTrain":
        return {"framework": "deepspeed", **unfused, **dropout, **serial}
    if is_fsdp2(row):
        kind = {"grads": "bf16", "moments": "bf16"} if "Automodel" in (row.get("source") or "") else {}
        return {"framework": "fsdp2", "fused_loss": False, **kind, "deepep": "DeepEP" in row.get("notes", "")}
    if SIMUMAX in framework:
        # --cp-comm-type a2a, fused loss of Transformer Engine; experts padded to a capacity factor of 1
        return {"cp_comm": "a2a", "loss_impl": "te", "capacity": 1.0}
    if is_ci(row):
        return {}
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
        return {"fused_loss": False, **dropout, **more}
    if "Megatron-Bridge" in framework + (row.get("source") or "") or re.match(r"NeMo|tag v", release):
        # scripts/performance of NeMo and Megatron-Bridge: fp8_param_gather, grad_reduce_in_fp32 off, the loss of
        # Transformer Engine (set_primary_perf_configs), LoRA of queries, keys and values only (llama3_70b_lora_config)
        return {"fp8_params": True, "grads": "bf16", "loss_impl": "te", "lora_targets": ("linear_qkv",)}
    if release in ("SC21", "Korthikanti22"):  # Megatron-LM of 2021 and 2022, before flash attention
        return {**unfused, **dropout, **serial}
    return {}


def _trained_in(row: Row, values: Mapping[str, Any]) -> dict[str, Any]:
    """The options without what a source does in FP8 only, where the row is in another precision."""
    plain = hardware.precision(row.get("precision") or "bf16") in hardware.PLAIN
    return {key: value for key, value in values.items() if key != "fp8_params" or not plain}


def options_text(values: Mapping[str, Any]) -> str:
    """Options as `--option` and the column `options` read them."""
    known = {f.name: f.default for f in fields(Options)}
    return ",".join(f"{key}={_word(value)}" for key, value in values.items() if value != known[key])


def _last_of_each(*texts: str) -> str:
    """Texts of options as one: what a later one says of an option counts."""
    words = [word for text in texts for word in text.split(",") if word]
    return ",".join({word.partition("=")[0]: word for word in words}.values())


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "+".join(value) if isinstance(value, tuple) else str(value)


def recomputed(row: Row, printed: str) -> tuple[str, str]:
    """The columns `recompute` and `layout`: tuned runs recompute what does not fit, and tables do not print it."""
    layout = "sp=false" if "no SP" in printed or row.get("release") == "vTrain" else ""
    tuned = bool(row.get("release")) or is_fsdp2(row)
    return ("auto" if tuned and not printed else printed.replace(" (no SP)", "")), layout


def preset(row: Row) -> Row:
    """The line of `PRESETS` that a row was run with; an empty one for rows of other software."""
    fits = (line for line in _presets() if _fits(line, row))
    return next(fits, dict.fromkeys(("recompute", "options", "ran"), ""))


@cache
def _presets() -> list[dict[str, str]]:
    with PRESETS.open(newline="") as file:
        return list(csv.DictReader(file))


def _fits(line: Row, row: Row) -> bool:
    source, release = row.get("source") or "", row.get("release") or ""
    bridge = "Megatron-Bridge" in source or "NeMo 25.09" in release
    ran = re.search(line["run"], source) if line["run"] else bridge
    columns_fit = all(re.fullmatch(line[key] or ".*", row.get(key) or "") for key in PRESET_FOR)
    return bool(columns_fit and ran and re.search(line["release"], release))


def is_vtrain_node(row: Row) -> bool:
    """Whether a row is of vTrain's single-node runs: nothing recomputed, and a vocabulary that is not padded.

    Their configurations say `use_checkpoint` for all stages but the last, but the last one's layers take as long as
    the others'. The head's time at TP 1, where 50,257 rows are an odd number, is 2.5 to 4.7 times that at TP 2.
    """
    return row.get("release") == "vTrain" and _size(row, "gpus") <= 8


def _mlperf(row: Row) -> bool:
    return "MLPerf" in (row.get("framework") or "") + (row.get("release") or "")


def _size(row: Row, key: str) -> int:
    """A field's number, or 0 where it is none."""
    text = row.get(key) or ""
    return int(text) if text.isascii() and text.isdigit() else 0


def usual(row: Row) -> Mapping[str, int | str]:
    """Fields of a row that leaves them blank. MLPerf's Llama 70B LoRA runs 8,192 tokens over cp 8."""
    source, release = row.get("source") or "", row.get("release") or ""
    if _mlperf(row) and row.get("task") == "lora":
        return {"seq": 8192, "cp": 8}
    if "torchtitan" in source:
        # benchmarks/llama3_h100_202412_torchtitan.md: 8,192 tokens; train_configs: selective recomputation by operation
        return {"seq": 8192, "recompute": "selective AC"}
    if release == "SC21":
        mbs, vp = SC21_BATCHES.get(_size(row, "layers"), (1, 1))
        return {"mbs": mbs, "vp": vp}
    if release == "vTrain" and not is_vtrain_node(row):
        return {"recompute": "full"}
    if release.startswith("NeMo 24.07") and row.get("task") != "pretrain" and _size(row, "pp") > 1:
        # the table of fine-tuning has no column for it; that of pre-training has one layer a chunk
        return {"vp": models.find(row["model"]).layers // _size(row, "pp")}
    if re.search(r"NeMo 2(5\.(09|1)|6)|verification card", release) or "Megatron-Bridge" in source:
        # Megatron-Bridge, scripts/performance/configs: expert_tensor_parallel_size=1 in every preset; Nemotron 3's
        # sequences are of 8,192 tokens
        return {"etp": 1} | ({"seq": 8192} if (row.get("model") or "").startswith("nemotron3") else {})
    if "dgxc" in source and row.get("model") == "nemotron4_340b" and _size(row, "pp") > 1:
        return {"vp": 12}  # the recipe's; a README of one release leaves it out
    if "dgxc" in source and row.get("model") == "grok1_314b" and "h100" in (row.get("gpu") or ""):
        return {"layers": next((n for gpus, n in GROK_LAYERS if _size(row, "gpus") <= gpus), 64)}
    if "2401.10241" in source:
        pp, layers = _size(row, "pp"), _size(row, "layers")
        return {"vp": (layers + 2) // pp} if "interleaved" in (row.get("schedule") or "") else {}
    return {}


def _of_job(row: Row, job: PlannedJob) -> dict[str, str]:
    """A row whose arguments of Megatron-LM stand for its job: the same in columns, and shorter."""
    gpt = published.job({"model": "gpt", **{key: row[key] for key in ("layers", "hidden", "heads")}}).model
    same = ("layers", "hidden", "heads", "ffn", "kv_heads", "vocab")
    shape = {key: getattr(job.model, key) for key in published.SHAPE if key not in same}
    differs = {key: _word(value) for key, value in shape.items() if value != getattr(gpt, key)}
    changed = {f.name: getattr(job.options, f.name) for f in fields(Options) if f.name != "release"}
    layout = f"sp={str(job.layout.sp).lower()},sharding={job.layout.sharding}"
    return {**row, **differs, "options": options_text(changed), "layout": layout, "flags": "", "held_out": ""}


def condensed(rows: list[dict[str, str]]) -> Iterator[dict[str, str]]:
    """A raw table's rows in the columns of benchmarks/reference, those that stay empty left out."""
    kind = "memory" if "allocated_gib" in rows[0] else "time"
    whole = [condense(row, kind=kind) for row in rows]
    if kind == "time":  # nothing is fitted to memory
        held_out.name_twins(whole)
    names = dict.fromkeys(key for row in whole for key in row)
    used = [key for key in names if key == "held_out" or any(row.get(key) for row in whole)]
    kept = [key for key in used if key not in DROPPED]
    return ({key: row.get(key, "") for key in kept} for row in whole)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a table, of a raw one condensed: so that both can be scored."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return rows if not rows or "held_out" in rows[0] else list(condensed(rows))


def main(raw: Path, out: Path) -> int:
    """The command."""
    rows = read(raw)
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"{out}: {len(rows):,} rows, {len(rows[0])} columns")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:3])))
