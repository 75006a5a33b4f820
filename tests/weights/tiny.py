"""Tiny Hugging Face folders with random weights, made on the spot: no hub, no network."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TEXTS = ["the quick brown fox jumps over the lazy dog", "sphinx of black quartz, judge my vow", "two and two are four"]
ROWS = 320
"""Rows of the embedding: more than the tokenizer has ids, as in most published models."""

SIZES = {
    "vocab_size": ROWS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
KINDS: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "mistral": {"sliding_window": None, "head_dim": 16},
    "gemma": {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", "num_key_value_heads": 1},
    "starcoder2": {"sliding_window": None, "use_bias": True, "tie_word_embeddings": True},
}


def folder(out: Path, kind: str, **sizes: object) -> Path:
    """A Hugging Face folder of that model_type: bf16 weights from a fixed seed, and a byte-level tokenizer."""
    import torch
    import transformers

    from superpod.data.tokens import tokenizer

    tokenizer.train(TEXTS * 4, 300, out)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind], **ids, **sizes})
    torch.manual_seed(1234)
    model = transformers.AutoModelForCausalLM.from_config(config, torch_dtype=torch.bfloat16)
    model.save_pretrained(out)
    return out


def hollow(out: Path) -> Path:
    """A folder that looks like a Hugging Face folder until its weights are loaded."""
    out.mkdir(exist_ok=True)
    (out / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    (out / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (out / "tokenizer.json").write_text("{}")
    return out


def changed(folder: Path, **keys: object) -> None:
    """Set keys of a folder's config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


def rewritten(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change the tensors of a folder."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def customize(folder: Path, executed: Path) -> None:
    """Make a folder name code of its own for all its parts; executed, that code makes the file `executed`."""
    for name in ("modeling_own", "tokenization_own"):
        (folder / f"{name}.py").write_text(f"open({str(executed)!r}, 'w').close()\n")
    maps = {
        "config.json": {"AutoModelForCausalLM": "modeling_own.OwnModel", "AutoConfig": "ORG/NAME--modeling_own.Config"},
        "tokenizer_config.json": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]},
        "generation_config.json": {"GenerationConfig": "modeling_own.Generation"},
    }
    for name, auto_map in maps.items():
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, "auto_map": auto_map, "trust_remote_code": True}))


RECIPE = {
    "num_hidden_layers": 4,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
}
"""Sizes of the recipe tiny_llama3."""

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def sums(count: int) -> list[dict[str, object]]:
    """Numbered sums of two numbers below five, no two alike, as prompts and, every third, as a chat."""
    import random

    rng, rows = random.Random(1), []
    for at in range(count):
        a, b = rng.randrange(5), rng.randrange(5)
        question, answer = f"{at}: {NUMBERS[a]} and {NUMBERS[b]}", NUMBERS[a + b]
        messages = [{"role": "user", "content": f"{question}?"}, {"role": "assistant", "content": answer}]
        rows.append({"prompt": f"{question} are", "completion": f" {answer}"} if at % 3 else {"messages": messages})
    return rows


if __name__ == "__main__":  # tiny.py OUT [KIND]: a folder of that kind; without one, that fits the recipe tiny_llama3
    out, *kinds = sys.argv[1:]
    folder(Path(out), *(kinds or ["llama"]), **({} if kinds else RECIPE))
