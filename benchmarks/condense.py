"""Convert raw tables of published runs for benchmarks/reference: `python benchmarks/condense.py RAW.csv OUT.csv`.

A raw table contains the values that its sources print. Settings that all runs of a source share are in its launch
scripts, which are cited here; this module writes them to the columns that `recipes predict` reads, so that a table
describes its runs completely. It uses neither a row's id nor its measurements. `held_out` marks the fifth of the
configurations to which nothing is fitted; it is a hash of the printed values, and therefore stable. `twin` = neither
fitted nor held out (held_out.py).
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
from superpod.planner.calibration import releases
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
"""Arguments of CI cases that rows do not list: "" = of all cases, else of those whose flags contain the key."""

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
"""Pattern of a CI case's name -> its arguments; `vp1` is the number of layers per virtual stage."""

SC21_BATCHES = {
    **{24: (16, 1), 30: (16, 1), 36: (16, 1), 40: (8, 1), 48: (4, 1)},
    **{60: (2, 3), 80: (2, 2), 96: (1, 2), 105: (1, 3), 128: (1, 1)},
}
"""Layers -> (micro-batch size, chunks per stage) in arXiv:2104.04473 Table 1: Megatron-LM examples/sc21."""
GROK_LAYERS = ((8, 2), (16, 4), (32, 4), (64, 8), (128, 16), (256, 32))
"""(maximum GPUs, layers) in dgxc-benchmarking grok1/README_314b.md, which truncates the model of 64 layers."""

PRESETS = Path(__file__).parent / "reference" / "presets.csv"
"""Settings in a run's scripts or log that its table does not print: presets of Megatron-Bridge's
scripts/performance/configs and configurations of MLPerf's submissions. The first line whose patterns match a row
applies; `run` matches the row's source, and is blank for Megatron-Bridge's tables. `ran`: columns that replace those of
the table, which prints them for a different precision or not at all."""
PRESET_FOR = ("task", "model", "gpu", "precision", "mbs", "pp")
DROPPED = ("case", "schedule", "model_as_printed", "tflops_per_gpu", "size", "zero")
"""Columns of raw tables that condensed tables do not need."""
NANOTRON = "nanotron"


def condense(row: Row, *, kind: str = "time") -> dict[str, str]:
    """Convert a raw row to the columns of benchmarks/reference. `kind`: its table, `memory` or `time`."""
    row = {key: (value or "").strip() for key, value in row.items()}
    is_held_out = "yes" if held_out.is_selected(row, kind) else ""
    if NANOTRON in row.get("release", ""):
        return _replace_flags(row, published.job(row))
    if "in parentheses" in row.get("notes", "") and hardware.precision(row["precision"]) == "fp8":
        # NeMo 25.09's tables have two columns: those in parentheses use blockwise scaling, on Blackwell MXFP8
        row["precision"] = "mxfp8" if "mxfp8" in hardware.node(gpu(row)).gpu.precisions else "fp8bw"
    blanks = {key: str(value) for key, value in usual(row).items()}
    complete = {**row, **{key: row.get(key) or value for key, value in blanks.items()}, **_shape(row)}
    known = preset(row)
    complete |= dict(word.split("=") for word in known["ran"].split())
    complete["gpu"], complete["gpus"] = gpu(row), row.get("gpus") or ("8" if is_ci(row) else "")
    complete["options"] = _merge_options(options_text(_without_fp8_options(row, options(row))), known["options"])
    if is_ci(row):
        complete["release"] = "mcore 0.11" if "dracooci" in row["source"] else "mcore main"
    if row.get("flags") or is_ci(row):
        complete["flags"] = "; ".join(f"{name}={value}" for name, value in arguments(row).items())
    complete["recompute"], complete["layout"] = recompute_columns(row, complete.get("recompute", ""))
    # A verification card lists the recomputation of its recipe, not of its run.
    complete["recompute"] = known["recompute"] or complete["recompute"]
    if is_fsdp2(row):
        complete["fsdp"] = row.get("fsdp") or "1"
    return {**complete, "held_out": is_held_out}


def has_images(row: Row) -> bool:
    """Return whether a row also trains a vision encoder, which the planner does not support: by the name of its recipe,
    or for models of which Megatron-Bridge has no other recipe."""
    text = " ".join(row.get(key) or "" for key in ("notes", "outcome", "source"))
    return bool(re.search(r"_vl_|model_verification_cards/(gemma-4|qwen3\.8)", text))


def contradicts(job: PlannedJob) -> bool:
    """Return whether a row's numbers are contradictory: its batch is smaller than a micro-batch per rank."""
    return job.layout.gbs < job.layout.mbs * job.dp


def is_ci(row: Row) -> bool:
    """Return whether a row is one of Megatron-LM's functional tests."""
    return CI in (row.get("framework") or "")


def is_fsdp2(row: Row) -> bool:
    """Return whether a row is from torchtitan or NeMo Automodel, which use PyTorch's FSDP2 (ZeRO-3)."""
    text = (row.get("framework") or "") + (row.get("source") or "") + (row.get("unit") or "")
    return "torchtitan" in text or "Automodel" in text


def gpu(row: Row) -> str:
    """Return the GPU of a row; torchtitan's H100s have 96 GB and 500 W (its benchmark pages), see hardware.toml."""
    name = row.get("gpu") or _default_gpu(row)
    special = name.startswith("h100-96gb") or ("llama3_h100_202412" in (row.get("source") or "") and "h100" in name)
    return "h100_96gb" if special else name


def _default_gpu(row: Row) -> str:
    """Return the GPU of a row that names none: A100 in CI's long-term-support runs, GB200 for MXFP8, else H100."""
    if not is_ci(row):
        return "gb200" if re.search(r"MXFP8|fp8-mx|nvfp4", row.get("precision") or "", re.I) else "h100-80gb"
    golden = (row.get("source") or "").rsplit("/", 1)[-1]
    return "a100-80gb" if "a100" in golden or "lts" in golden else "h100-80gb"


def arguments(row: Row) -> dict[str, str]:
    """Return the Megatron-LM arguments of a row, with those that its source always sets.

    Runs on the cluster dracooci predate the attention backend of the cases: flash attention was disabled.
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
    """Return the shape columns of a row: the model of its source where it differs from the named model.

    SimuMax's Llama 405B has 16 key-value heads (run_pretrain_llama3.sh, num_query_groups), and its DeepSeeks one dense
    layer (run_pretrain_deepseekv2.sh, MOE_LAYER_FREQ). MLPerf trains Llama 405B with Mixtral's tokenizer of 32,000
    (mlcommons/training large_language_model_pretraining/nemo). vTrain's nodes do not pad the vocabulary: the head's
    time is that of 50,257 rows in tp shards (src/model/gpt_modeling.py).
    """
    if row["model"] in ("gpt", "moe"):
        if not is_vtrain_node(row):
            return {}
        tp = _size(row, "tp") or 1
        return {"vocab": str(50257 // tp * tp), "vocab_divisible_by": "1"}
    # Blank columns have the values of the named model.
    printed: dict[str, str] = dict.fromkeys(("hidden", "ffn", "heads", "kv_heads", "vocab"), "")
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
    """Return the fields of `Options` that the source of a row sets."""
    framework, release = row.get("framework") or "", row.get("release") or ""
    if release == "vTrain":
        return {"framework": "deepspeed", **releases.UNFUSED, **releases.DROPOUT, **releases.NO_OVERLAP}
    if is_fsdp2(row):
        kind = {"grads": "bf16", "moments": "bf16"} if "Automodel" in (row.get("source") or "") else {}
        return {"framework": "fsdp2", "fused_loss": False, **kind, "deepep": "DeepEP" in row.get("notes", "")}
    if SIMUMAX in framework:
        # --cp-comm-type a2a, fused loss of Transformer Engine; experts padded to a capacity factor of 1
        return {"cp_comm": "a2a", "loss_impl": "te", "capacity": 1.0}
    if is_ci(row):
        return {}
    if _mlperf(row):
        return dict(releases.find("MLPerf", release).options)
    if "sail-sg" in framework:
        # Megatron's dropout. arXiv:2401.10241, of 2023: no flash attention. 2411.05288: 16 bytes per parameter (those
        # of the vocabulary in its Table 5), so gradients in BF16; 18 in its artifact
        source = row.get("source") or ""
        more = {"attention": "unfused"} if "2401.10241" in source else {}
        more |= {"grads": "bf16"} if "2411.05288" in source else {}
        return {"fused_loss": False, **releases.DROPOUT, **more}
    if "Megatron-Bridge" in framework + (row.get("source") or "") or re.match(r"NeMo|tag v", release):
        return dict(releases.PERFORMANCE)
    if release in ("SC21", "Korthikanti22"):  # Megatron-LM of 2021 and 2022, before flash attention
        return {**releases.UNFUSED, **releases.DROPOUT, **releases.NO_OVERLAP}
    return {}


def _without_fp8_options(row: Row, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without those for FP8 if the row has another precision."""
    plain = hardware.precision(row.get("precision") or "bf16") in hardware.PLAIN
    return {key: value for key, value in values.items() if key != "fp8_params" or not plain}


def options_text(values: Mapping[str, Any]) -> str:
    """Format options for `--option` and the column `options`, without defaults."""
    known = {f.name: f.default for f in fields(Options)}
    return ",".join(f"{key}={_format_value(value)}" for key, value in values.items() if value != known[key])


def _merge_options(*texts: str) -> str:
    """Join texts of options; a later text overrides the options of an earlier one."""
    words = [word for text in texts for word in text.split(",") if word]
    return ",".join({word.partition("=")[0]: word for word in words}.values())


def _format_value(value: Any) -> str:
    """Format the value of an option."""
    if isinstance(value, bool):
        return str(value).lower()
    return "+".join(value) if isinstance(value, tuple) else str(value)


def recompute_columns(row: Row, printed: str) -> tuple[str, str]:
    """Return the columns `recompute` and `layout`; tuned runs recompute as needed, which tables do not print."""
    layout = "sp=false" if "no SP" in printed or row.get("release") == "vTrain" else ""
    tuned = bool(row.get("release")) or is_fsdp2(row)
    return ("auto" if tuned and not printed else printed.replace(" (no SP)", "")), layout


def preset(row: Row) -> Row:
    """Return the line of `PRESETS` that applies to a row; a blank one if none does."""
    fits = (line for line in _presets() if _matches(line, row))
    return next(fits, dict.fromkeys(("recompute", "options", "ran"), ""))


@cache
def _presets() -> list[dict[str, str]]:
    with PRESETS.open(newline="") as file:
        return list(csv.DictReader(file))


def _matches(line: Row, row: Row) -> bool:
    """Return whether a line of `PRESETS` applies to a row."""
    source, release = row.get("source") or "", row.get("release") or ""
    bridge = "Megatron-Bridge" in source or "NeMo 25.09" in release
    ran = re.search(line["run"], source) if line["run"] else bridge
    columns_fit = all(re.fullmatch(line[key] or ".*", row.get(key) or "") for key in PRESET_FOR)
    return bool(columns_fit and ran and re.search(line["release"], release))


def is_vtrain_node(row: Row) -> bool:
    """Return whether a row is a single-node run of vTrain: without recomputation, with an unpadded vocabulary.

    Their configurations set `use_checkpoint` for all stages except the last, but the layers of the last stage take as
    long as the others. The head's time at TP 1, where 50,257 rows are an odd number, is 2.5 to 4.7 times that at TP 2.
    """
    return row.get("release") == "vTrain" and _size(row, "gpus") <= 8


def _mlperf(row: Row) -> bool:
    return "MLPerf" in (row.get("framework") or "") + (row.get("release") or "")


def _size(row: Row, key: str) -> int:
    """Return the integer in a column, or 0 if it has none."""
    text = row.get(key) or ""
    return int(text) if text.isascii() and text.isdigit() else 0


def usual(row: Row) -> Mapping[str, int | str]:
    """Return column -> usual value of a row's source, for blank cells."""
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
        # the table of fine-tuning has no column for it; that of pretraining has one layer per chunk
        return {"vp": models.find(row["model"]).layers // _size(row, "pp")}
    if re.search(r"NeMo 2(5\.(09|1)|6)|verification card", release) or "Megatron-Bridge" in source:
        # Megatron-Bridge, scripts/performance/configs: expert_tensor_parallel_size=1 in every preset; Nemotron 3's
        # sequences are of 8,192 tokens
        return {"etp": 1} | ({"seq": 8192} if (row.get("model") or "").startswith("nemotron3") else {})
    if "dgxc" in source and row.get("model") == "nemotron4_340b" and _size(row, "pp") > 1:
        return {"vp": 12}  # from the recipe; the README of one release omits it
    if "dgxc" in source and row.get("model") == "grok1_314b" and "h100" in (row.get("gpu") or ""):
        return {"layers": next((n for gpus, n in GROK_LAYERS if _size(row, "gpus") <= gpus), 64)}
    if "2401.10241" in source:
        pp, layers = _size(row, "pp"), _size(row, "layers")
        return {"vp": (layers + 2) // pp} if "interleaved" in (row.get("schedule") or "") else {}
    return {}


def _replace_flags(row: Row, job: PlannedJob) -> dict[str, str]:
    """Return a row with its Megatron-LM arguments replaced by columns for the same job."""
    gpt = published.job({"model": "gpt", **{key: row[key] for key in ("layers", "hidden", "heads")}}).model
    same = ("layers", "hidden", "heads", "ffn", "kv_heads", "vocab")
    shape = {key: getattr(job.model, key) for key in published.SHAPE if key not in same}
    differs = {key: _format_value(value) for key, value in shape.items() if value != getattr(gpt, key)}
    changed = {f.name: getattr(job.options, f.name) for f in fields(Options) if f.name != "release"}
    layout = f"sp={str(job.layout.sp).lower()},sharding={job.layout.sharding}"
    return {**row, **differs, "options": options_text(changed), "layout": layout, "flags": "", "held_out": ""}


def condensed(rows: list[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Yield the rows of a raw table in the columns of benchmarks/reference, without empty columns."""
    kind = "memory" if "allocated_gib" in rows[0] else "time"
    complete = [condense(row, kind=kind) for row in rows]
    if kind == "time":  # nothing is fitted to memory
        held_out.mark_twins(complete)
    names = dict.fromkeys(key for row in complete for key in row)
    used = [key for key in names if key == "held_out" or any(row.get(key) for row in complete)]
    kept = [key for key in used if key not in DROPPED]
    return ({key: row.get(key, "") for key in kept} for row in complete)


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table, condensed if it is a raw table."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return rows if not rows or "held_out" in rows[0] else list(condensed(rows))


def main(raw: Path, out: Path) -> int:
    """Condense the table `raw` to `out`; return the exit code."""
    rows = read(raw)
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"{out}: {len(rows):,} rows, {len(rows[0])} columns")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:3])))
