"""Compare fine-tuned models with transformers' own results: `compare_with_transformers.py FOLDER NAME ...`.

Writes FOLDER/NAME.json for every NAME; one process for all, because importing NeMo takes long.
"""

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

RUNS = {
    "sft": ("tiny_llama3_sft", "model"),
    "lora": ("tiny_llama3_lora", "model"),
    "qwen2": ("qwen2_500m_sft_a100_bf16", "qwen2-model"),
    "mixtral": ("mixtral_8x7b_sft_a100_bf16", "mixtral-model"),
    "mistral": ("mistral_7b_sft_a100_bf16", "mistral-model"),
    "gemma": ("gemma_2b_sft_a100_bf16", "gemma-model"),
    "starcoder2": ("starcoder2_3b_sft_a100_bf16", "starcoder2-model"),
}
"""name -> the recipe of its run, and the folder of the model that it started from."""


def main(folder: Path, *names: str) -> None:
    from superpod.rehearsal import install

    install()
    import nemo.collections.llm  # noqa: F401 - imported once, for the processes that are forked from this one
    import torch

    torch.set_num_threads(1)  # a fork has none of its parent's OpenMP threads, and would wait for them for ever
    for name in names:
        (folder / f"{name}.json").write_text(json.dumps(compared(folder, *RUNS[name], name)))


def compared(folder: Path, recipe: str, model: str, out: str) -> dict[str, Any]:
    from superpod.launch import subprocess_call
    from superpod.reports.runs import checkpoint_list
    from superpod.runtime.runs.run_folder import RunFolder

    run = RunFolder.latest(folder / "runs", recipe)
    assert run
    best = str(checkpoint_list.choose_best(checkpoint_list.list_checkpoints(run.path)).path)
    files, log = [folder / name for name in ("prompts.jsonl", "chats.jsonl")], folder / "log"
    perplexity = "superpod.weights.serving.generate:perplexity"
    generate = {"checkpoint": best, "prompts": ["two and two are"], "tokens": 4}
    return {
        "nemo": mean(subprocess_call.call(perplexity, log, checkpoint=best, data=str(f))["loss"] for f in files),
        "transformers": mean(transformers_loss(folder / out, file) for file in files),
        "before": mean(transformers_loss(folder / model, file) for file in files),
        "answers": subprocess_call.call("superpod.weights.serving.generate:generate", log, **generate),
        "transformers_answer": transformers_answer(folder / out, generate["prompts"][0], generate["tokens"]),
        "merged": subprocess_call.call("tests.launch.compare_with_transformers:merged", log, checkpoint=best),
        "changed": changed(folder / model, folder / out),
        "template": (folder / out / "chat_template.jinja").is_file(),
        "val_loss": [line["val_loss"] for line in run.metrics() if line.get("val_loss") is not None],
        "facts": run.facts["samples"],
        "state": run.state(),
    }


def transformers_loss(model: Path, data: Path) -> float:
    """Mean loss of the learnt tokens, in nats, from the logits of transformers alone, in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    from superpod.data.samples import chat, samples

    network, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model, torch_dtype=torch.float32),
        chat.load_tokenizer(str(model)),
    )
    total, count = 0.0, 0
    for sample in samples.read_samples(data):
        encoded = chat.encode_sample(sample, tokenizer)
        ids, learnt = torch.tensor([encoded.ids]), torch.tensor(encoded.loss_mask[1:])
        with torch.no_grad():
            log_probabilities = torch.log_softmax(network(ids).logits[0, :-1], -1)
        total -= log_probabilities.gather(1, ids[0, 1:, None])[learnt].sum().item()
        count += int(learnt.sum())
    return total / count


def transformers_answer(model: Path, prompt: str, tokens: int) -> str:
    """The likeliest tokens after a prompt, according to transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    from superpod.data.samples import chat

    network, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model, torch_dtype=torch.float32),
        chat.load_tokenizer(str(model)),
    )
    inputs: Any = tokenizer(prompt, return_tensors="pt")
    answer = network.generate(**inputs, max_new_tokens=tokens, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(answer, skip_special_tokens=True)


def merged(checkpoint: str) -> dict[str, list[float]]:
    """Adapted layer -> how much its adapter changes its output, and how far the merged output is from that."""
    import torch
    from nemo.collections.llm.peft.lora import LoRALinear

    from superpod.weights.transfer import load

    model = load.load_model(Path(checkpoint), torch.float32)
    layers: dict[str, Any] = {
        name: module for name, module in load.unwrap_model(model).named_modules() if isinstance(module, LoRALinear)
    }
    inputs = {name: torch.randn(3, 1, layer.adapter.linear_in.weight.shape[1]) for name, layer in layers.items()}
    with torch.no_grad():
        adapted = {name: layer(inputs[name])[0] for name, layer in layers.items()}
        plain = {name: layer.to_wrap(inputs[name])[0] for name, layer in layers.items()}
        assert load.merge_adapters(model) == len(layers)
        merged = {name: layer.to_wrap(inputs[name])[0] for name, layer in layers.items()}
    # A layer with a fused norm returns a tuple: its output, and the normalized input.
    before = {name: (output[0] if isinstance(output, tuple) else output) for name, output in plain.items()}
    after = {name: (output[0] if isinstance(output, tuple) else output) for name, output in merged.items()}
    return {
        name: [(adapted[name] - before[name]).abs().max().item(), (adapted[name] - after[name]).abs().max().item()]
        for name in layers
    }


def changed(before: Path, after: Path) -> list[str]:
    """Names of the matrices that differ."""
    import torch
    from safetensors.torch import load_file

    old, new = (load_file(folder / "model.safetensors") for folder in (before, after))
    assert old.keys() == new.keys()
    return [name for name in old if not torch.equal(old[name], new[name])]


if __name__ == "__main__":  # checkpoint writers, processes of their own, import this file again
    main(Path(sys.argv[1]), *sys.argv[2:])
