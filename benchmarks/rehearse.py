"""Rehearse recipes of different shape, say where the time goes, and keep the results for docs/rehearsal.md.

    python benchmarks/rehearse.py [NAME@NODES ...]      default: all of RECIPES
    python benchmarks/rehearse.py --write               the table of docs/rehearsal.md from docs/rehearsals.json

NeMo is imported once; each rehearsal is forked from there, and its time is without that import.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "docs" / "rehearsals.json", ROOT / "docs" / "rehearsal.md"
BEGIN, END = "<!-- generated: python benchmarks/rehearse.py --write -->", "<!-- end of rehearsals -->"

RECIPES = {
    "llama3_8b_pretrain_a100_bf16@1": "dense, GQA, TP",
    "qwen25_14b_pretrain_h100_fp8ds@1": "QKV biases, TP x PP x DP, FP8",
    "llama3_8b_64k_pretrain_a100_bf16@2": "long context: TP x CP, full recomputation",
    "llama3_70b_pretrain_a100_bf16@8": "interleaved stages, CP, selective recomputation",
    "llama31_405b_pretrain_a100_bf16@64": "the ends count as layers, interleaved",
    "llama32_3b_sft_h100_fp8ds@4": "SFT; tied embeddings across interleaved stages",
    "llama2_70b_lora_h100_fp8ds@1": "LoRA, interleaved, recomputation",
    "gpt3_175b_pretrain_a100_bf16@8": "LayerNorm, biases, learned positions, TP x PP",
    "qwen3_30b_a3b_pretrain_a100_bf16@1": "MoE: TP x PP x EP, QK norms",
    "mixtral_8x7b_16k_pretrain_a100_bf16@4": "MoE with every degree: TP PP VP CP EP",
    "qwen3_235b_a22b_pretrain_b200_bf16@8": "MoE, uneven stages",
    "llama4_maverick_pretrain_h100_bf16@64": "MoE: expert tensor parallelism, dense every other layer",
    "deepseek_v2_lite_pretrain_h200_bf16@1": "latent attention, shared experts, EP",
    "deepseek_v3_pretrain_a100_bf16@32": "latent attention, groups of experts, chunks given, multi-token prediction",
    "gemma2_9b_sft_h100_fp8ds@2": "windows in every other layer, soft caps, tied, interleaved",
    "gpt_oss_20b_lora_h100_fp8bw@1": "LoRA on experts, attention sinks, windows",
    "nemotron4_340b_pretrain_a100_bf16@16": "squared ReLU, zero-centred LayerNorm",
    "starcoder2_15b_pretrain_a100_bf16@2": "a window, biases, LayerNorm",
    "chatglm3_6b_pretrain_a100_bf16@1": "half of each head rotated, CP",
    "mistral_nemo_12b_pretrain_a100_bf16@1": "heads wider than the hidden state",
    "nemotron3_22b_pretrain_a100_fp16@4": "FP16",
    "llama31_405b_dora_b300_bf16@4": "DoRA, CP",
}
"""Recipe@nodes -> what its shape has that others have not."""


def main() -> None:
    """Rehearse what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help="NAME@NODES")
    parser.add_argument("--write", action="store_true", help="write the table from the results, and run nothing")
    asked = parser.parse_args()
    if asked.write:
        PAGE.write_text(with_table(PAGE.read_text(), json.loads(RESULTS.read_text())))
        return
    started = time.time()
    for name in ("superpod.launchers.rehearsal.entry", "superpod.recipes.base"):  # the patches, NeMo and all of ours
        importlib.import_module(name)
    print(f"importing NeMo: {time.time() - started:.0f} s", flush=True)
    failed = [one for one in asked.recipes or RECIPES if not _rehearse(one)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def _rehearse(one: str) -> bool:
    """Rehearse in a fork, so that one leaves nothing behind for the next; keep what it found."""
    folder = Path(tempfile.mkdtemp(prefix="recipes-rehearse-"))
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = _in_fork(one, folder)
        finally:
            os._exit(code)
    os.waitpid(pid, 0)
    file = folder / "result.json"
    found = json.loads(file.read_text()) if file.is_file() else {"passed": False, "error": "no result"}
    if found["passed"]:
        shutil.rmtree(folder, ignore_errors=True)
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    kept[one] = found
    RESULTS.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
    seconds = found.get("seconds", {})
    spent = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    bad = "; ".join(f"{each['name']}: {each['said']}" for each in found.get("checks", []) if not each["passed"])
    how = "passed" if found["passed"] else f"FAILED {bad or found.get('error')} ({folder})"
    print(f"{one}  {how}  {sum(seconds.values()):.0f} s: {spent}", flush=True)
    return found["passed"]


def _in_fork(one: str, folder: Path) -> int:
    from superpod.launchers.cli.rehearse import facts
    from superpod.launchers.quiet import quietly
    from superpod.launchers.rehearsal import trial

    name, _, nodes = one.partition("@")
    with quietly(folder / "rehearse.log"):
        found = trial.conduct(trial.plan(name, int(nodes) if nodes else None), folder)
        (folder / "result.json").write_text(json.dumps(facts(found)))
    return 0


def table(results: dict[str, Any]) -> str:
    """The rehearsals as Markdown."""
    lines = [
        "| recipe | nodes | what it shows | ranks | topology | loss | fp32 against one rank | own precision | s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in [each for each in RECIPES if each in results]:
        found, (name, _, nodes) = results[one], one.partition("@")
        if not found["passed"]:
            why = "; ".join(f"{c['name']}: {c['said']}" for c in found.get("checks", []) if not c["passed"])
            lines.append(f"| `{name}` | {nodes} | {RECIPES[one]} | | **failed**: {why or found.get('error')} | | | | |")
            continue
        said = {check["name"]: check["said"] for check in found["checks"]}
        near = {
            key.rpartition(", ")[2]: text.partition(" apart")[0] for key, text in said.items() if "one rank's" in key
        }
        fp32 = near.pop("one rank's losses, fp32")
        own = next(iter(near.values()), "")
        loss = said["loss falls"].partition(" in ")[0]
        seconds = sum(value for key, value in found["seconds"].items() if key != "import and build")
        cells = (f"`{name}`", nodes, RECIPES[one], found["ranks"], found["topology"], loss, fp32, own, f"{seconds:.0f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def with_table(page: str, results: dict[str, Any]) -> str:
    """`page` with the table between its marks renewed."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(results)}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    main()
