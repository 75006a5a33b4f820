"""Run `recipes` with malformed input: print the slowest refusals, and inputs that are not refused.

Each command must exit with code 2 and a message within `TARGET_S`, without a traceback or "our failure", and without
importing NeMo. tests/cli/test_hostile.py tests the same inputs.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TARGET_S = 3.0
SLOWEST = 10
RECIPE, SFT = "llama3_8b_pretrain_h100_bf16", "tiny_llama3_sft"
GPUS = ("--gpu", "h100", "--gpus", "16")

LLAMA: dict[str, Any] = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320},
    **{"max_position_embeddings": 128, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
}
DEEPSEEK: dict[str, Any] = {
    **{**LLAMA, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 4},
    **{"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1},
}
MODELS: dict[str, dict[str, Any]] = {
    "negative": {**DEEPSEEK, "kv_lora_rank": -1},
    "headless": {**LLAMA, "head_dim": 0},
    "quoted": {**LLAMA, "hidden_size": "64"},
    "listed": {**LLAMA, "num_hidden_layers": [2]},
    "half": {**LLAMA, "vocab_size": 320.5},
    "huge": {**LLAMA, "intermediate_size": 10**30},
    "deep": {**LLAMA, "num_hidden_layers": 10**6},
    "eps": {**LLAMA, "rms_norm_eps": float("nan")},
    "theta": {**LLAMA, "rope_theta": float("inf")},
    "no_factor": {**LLAMA, "rope_scaling": {"rope_type": "linear"}},
    "text_factor": {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": "two"}},
    "nested_factor": {**LLAMA, "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": -2}}},
    "no_object": {**LLAMA, "rope_scaling": ["linear", 2]},
    "maybe": {**LLAMA, "tie_word_embeddings": "maybe"},
    "kinds": {**LLAMA, "layer_types": "full_attention"},
    "type": {**LLAMA, "model_type": ["llama"]},
    "act": {**LLAMA, "hidden_act": {"name": "silu"}},
    "groups": {**LLAMA, "num_key_value_heads": 3},
    "nothing": {},
}
"""Folder -> its config.json; all except the last two violate the table of `planner/formats/hf_values.py`."""
OWN_FILES: dict[str, bytes] = {
    "binary.json": b"\x80\x81 model",
    "cut.json": b'{"model_type": ',
    "list.json": b"[1, 2]",
    "bare.json": b"7",
    "empty.json": b"",
    "deep.json": b"[" * 100_000,
    "binary.toml": b"\xff\xfe[gpu]",
    "cut.toml": b"[gpu.x\n",
    "gpu.toml": b"[gpu.x]\nlike = 'h100'\nsms = 'many'\n",
    "site.toml": b"name = 5\n",
    "binary.csv": b"model,gpu\xff\xfe\n",
    "columns.csv": b"a,b\n1,2\n",
    "quote.csv": b'model,gpu,tp\n"llama3_8b,h100,1\n',
    "binary.py": b"\x80\x81",
    "syntax.py": b"def recipe(:\n",
    "binary.jsonl": b"\x80\x81\n",
    "scalar.jsonl": b"7\n8\n",
    "empty.jsonl": b"",
    "good.jsonl": b"".join(b'{"prompt": "%d", "completion": "b"}\n' % at for at in range(40)),
    "template.jinja": b"{% for %}",
    "ds.json": b'{"zero_optimization": {"stage": 9}}',
    "args.txt": b"--tensor-model-parallel-size two",
}


def prepare(folder: Path) -> None:
    """Create the files that the command lines use in `folder`."""
    for name, content in OWN_FILES.items():
        (folder / name).write_bytes(content)
    for name, config in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        (folder / name / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        (folder / name / "tokenizer.json").write_text("{}")
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to(folder / "loop")
    os.mkfifo(folder / "pipe.json")


NEEDS_NEMO = [("show", RECIPE, "trainer=3=4="), ("diff", "nemo:nothing", RECIPE)]
"""Command lines that only NeMo can refuse; importing it takes longer than the target."""


def command_lines() -> list[tuple[str, ...]]:
    """Return all command lines, without `recipes`."""
    return [*_model_commands(), *_file_commands(), *_number_commands(), *_word_commands()]


def _model_commands() -> list[tuple[str, ...]]:
    plans = [("plan", name, *GPUS) for name in MODELS]
    imports = [("ckpt", "convert", name, "out") for name in ("negative", "quoted", "eps", "text_factor", "kinds")]
    tunings = [("finetune", SFT, "--model", name, "--data", "good.jsonl") for name in ("maybe", "theta", "nothing")]
    return [*plans, *imports, *tunings]


def _file_commands() -> list[tuple[str, ...]]:
    models = ("none.json", "folder", "binary.json", "cut.json", "list.json", "bare.json", "empty.json", "deep.json")
    hardware = ("none.toml", "folder", "binary.toml", "cut.toml", "gpu.toml", "loop")
    return [
        *(("plan", name, *GPUS) for name in (*models, "pipe.json", "good.jsonl/x.json")),
        *(("plan", "llama3_8b", *GPUS, "--hardware", name) for name in hardware),
        *(("plan", "llama3_8b", *GPUS, "--from", name) for name in ("none", "folder", "binary.json", "ds.json")),
        ("plan", "llama3_8b", *GPUS, "--from", "args.txt"),
        *(("predict", "--from", name, "--out", "o.csv") for name in ("folder", "binary.csv", "columns.csv", "loop")),
        ("predict", "--from", "columns.csv", "--out", "none/o.csv"),
        *(("render", "tiny_llama3", "--cluster", name) for name in ("none.toml", "binary.toml", "site.toml", "folder")),
        *(("check", name) for name in ("none.py", "binary.py", "syntax.py", "folder")),
        *(("finetune", SFT, "--model", "none", "--data", name) for name in ("good.jsonl", "binary.jsonl")),
        ("finetune", SFT, "--model", "groups", "--data", "scalar.jsonl"),
        ("finetune", SFT, "--model", "groups", "--data", "good.jsonl", "--chat-template", "template.jinja"),
        ("ckpt", "convert", "folder", "out"),
        ("ckpt", "convert", "good.jsonl", "out"),
        ("ckpt", "list", "binary.json"),
        ("report", "binary.json"),
        ("prove", "tiny_llama3", "--cache", "binary.json"),
        ("perplexity", "folder", "--data", "scalar.jsonl"),
        ("--recipes", "binary.json", "list"),
    ]


def _number_commands() -> list[tuple[str, ...]]:
    large = "9" * 400
    return [
        *(("plan", "llama3_8b", "--gpu", "h100", "--gpus", number) for number in ("-1", "0", large, "1e3", "\u0663")),
        *(("plan", "llama3_8b", *GPUS, "--seq", number) for number in ("0", large, "nan")),
        *(("plan", "llama3_8b", *GPUS, "--batch-tokens", text) for text in ("-4M", "4Q", "inf", "")),
        *(("check", RECIPE, "--nodes", number) for number in ("0", "-3", "99999999999")),
        ("check", RECIPE, "--layout", "tp=0"),
        ("check", RECIPE, "--layout", f"tp={large}"),
        ("check", RECIPE, "--layout", "tp=2,tp=2"),
        ("cost", RECIPE, "--tokens", "1e999"),
        ("cost", RECIPE, "--tokens", "1T", "--price", "free"),
        ("scale", "llama3_8b", "--gpu", "h100", "--gpus", "8,-8"),
        ("tune", RECIPE, "--nodes", "0"),
        ("plan", f"layers={large},hidden=64,heads=1,vocab=10", *GPUS),
        ("plan", "layers=2,hidden=0,heads=0,vocab=0", *GPUS),
    ]


def _word_commands() -> list[tuple[str, ...]]:
    return [
        *(("plan", name, *GPUS) for name in ("", " ", "../..", "a" * 5000, "llama3_8b\nx", "\x1b[2J", "é" * 50)),
        ("show", RECIPE.upper() + "X"),
        ("show", RECIPE, "trainer.max_step=3"),
        ("show", RECIPE, "=3"),
        ("show", RECIPE, "with=everything"),
        ("run", "$(reboot)"),
        ("run", "tiny_llama3", "--resume", "../../etc"),
        ("submit", "tiny_llama3", "--cluster", "no cluster; true"),
        ("submit", "tiny_llama3", "--cluster", "dgx_h100", "--time", "soon"),
        ("submit", "tiny_llama3", "--cluster", "dgx_h100", "--runs", "here"),
        ("list", "--proof", "x" * 300),
    ]


def refused(command: tuple[str, ...], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`, and return its exit code and output."""
    words = [sys.executable, "-m", "superpod.cli", *command]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)


def cpu_s() -> float:
    """Return the CPU time of all commands so far, which does not depend on the load of the machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def what_is_wrong(done: subprocess.CompletedProcess[str]) -> str:
    """Return why a finished command is not a proper refusal; "" if it is one."""
    if "Traceback" in done.stderr + done.stdout or "our failure" in done.stderr:
        return "traceback or internal error"
    if done.returncode != 2:
        return f"exit code {done.returncode}"
    return "" if done.stderr.strip() else "no message"


def main() -> int:
    taken: list[tuple[float, float, str]] = []
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        for command in command_lines():
            start, cpu = time.perf_counter(), cpu_s()
            done = refused(command, Path(name))
            shown = " ".join(word if len(word) < 40 else f"{word[:37]}..." for word in map(repr, command))
            taken.append((time.perf_counter() - start, cpu_s() - cpu, shown))
            if problem := what_is_wrong(done):
                wrong.append(f"{problem}: recipes {shown}: {done.stderr.strip()[-200:]}")
    taken.sort(reverse=True)
    print(f"{len(taken)} hostile inputs; the slowest, target {TARGET_S:.0f} s:")
    for seconds, cpu, shown in taken[:SLOWEST]:
        print(f"{seconds:6.2f} s, {cpu:5.2f} s CPU time  recipes {shown}")
    print("\n".join(wrong) or "all refused")
    return 1 if wrong or taken[0][0] > TARGET_S else 0


if __name__ == "__main__":
    sys.exit(main())
