"""tuned.py FOLDER NAME ...: judge fine-tunings in FOLDER by transformers, in one process: FOLDER/NAME.json of each."""

import json
import sys
from pathlib import Path
from typing import Any

RUNS = {
    "sft": ("tiny_llama3_sft", "model"),
    "lora": ("tiny_llama3_lora", "model"),
    "qwen2": ("qwen2_500m_sft_a100_bf16", "qwen2-model"),
    "mixtral": ("mixtral_8x7b_sft_a100_bf16", "mixtral-model"),
}
"""The recipe and the model that each began with."""


def main(folder: Path, *names: str) -> None:
    from superpod.rehearsal import install

    install()
    import nemo.collections.llm  # noqa: F401 - once, for the processes that are forked from this one

    for name in names:
        (folder / f"{name}.json").write_text(json.dumps(judged(folder, *RUNS[name], name)))


def judged(folder: Path, recipe: str, model: str, out: str) -> dict[str, Any]:
    from superpod.launchers import subprocess_call
    from superpod.lifecycle import checkpoints
    from superpod.node.run_folder import RunFolder

    run = RunFolder.latest(folder / "runs", recipe)
    assert run
    best = str(checkpoints.best(checkpoints.found(run.path)).path)
    data, log = str(folder / "data.jsonl"), folder / "log"
    asked = {"checkpoint": best, "prompts": ["two and two are"], "tokens": 4}
    return {
        "nemo": subprocess_call.call("superpod.recipes.weights.generate:perplexity", log, checkpoint=best, data=data)[
            "loss"
        ],
        "transformers": transformers_loss(folder / out, folder / "data.jsonl"),
        "before": transformers_loss(folder / model, folder / "data.jsonl"),
        "says": subprocess_call.call("superpod.recipes.weights.generate:generate", log, **asked),
        "transformers_says": transformers_says(folder / out, asked["prompts"][0], asked["tokens"]),
        "merged": subprocess_call.call("tests.launchers.tuned:merged", log, checkpoint=best),
        "changed": changed(folder / model, folder / out),
        "template": (folder / out / "chat_template.jinja").is_file(),
        "val_loss": [line["val_loss"] for line in run.metrics() if line.get("val_loss") is not None],
        "facts": run.facts["samples"],
        "state": run.state(),
    }


def transformers_loss(model: Path, data: Path) -> float:
    """Of the learnt tokens, from the logits of transformers alone, in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    from superpod.recipes.data import chat, samples

    whole, words = AutoModelForCausalLM.from_pretrained(model, torch_dtype=torch.float32), chat.load(str(model))
    total, count = 0.0, 0
    for each in samples.read(data):
        encoded = chat.encode(each, words)
        ids, learnt = torch.tensor([encoded.ids]), torch.tensor(encoded.learnt[1:])
        with torch.no_grad():
            known = torch.log_softmax(whole(ids).logits[0, :-1], -1)
        total -= known.gather(1, ids[0, 1:, None])[learnt].sum().item()
        count += int(learnt.sum())
    return total / count


def transformers_says(model: Path, prompt: str, tokens: int) -> str:
    """The likeliest tokens after a prompt, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    from superpod.recipes.data import chat

    whole, words = AutoModelForCausalLM.from_pretrained(model, torch_dtype=torch.float32), chat.load(str(model))
    given = words(prompt, return_tensors="pt")
    said = whole.generate(**given, max_new_tokens=tokens, do_sample=False)[0, given["input_ids"].shape[1] :]
    return words.decode(said, skip_special_tokens=True)


def merged(checkpoint: str) -> dict[str, list[float]]:
    """Of every adapted matrix: how much the adapter changes what it says, and how far merged is from applied."""
    import torch
    from nemo.collections.llm.peft.lora import LoRALinear

    from superpod.recipes.weights import load

    model = load.load(Path(checkpoint), torch.float32)
    layers: dict[str, Any] = {n: each for n, each in load.core(model).named_modules() if isinstance(each, LoRALinear)}
    given = {name: torch.randn(3, 1, each.adapter.linear_in.weight.shape[1]) for name, each in layers.items()}
    with torch.no_grad():
        applied = {name: each(given[name])[0] for name, each in layers.items()}
        plain = {name: each.to_wrap(given[name])[0] for name, each in layers.items()}
        assert load.merge(model) == len(layers)
        after = {name: each.to_wrap(given[name])[0] for name, each in layers.items()}
    first = {name: (found[0] if isinstance(found, tuple) else found) for name, found in plain.items()}
    last = {name: (found[0] if isinstance(found, tuple) else found) for name, found in after.items()}
    return {
        name: [(applied[name] - first[name]).abs().max().item(), (applied[name] - last[name]).abs().max().item()]
        for name in layers
    }


def changed(before: Path, after: Path) -> list[str]:
    """Names of the matrices that are other ones."""
    import torch
    from safetensors.torch import load_file

    one, two = (load_file(each / "model.safetensors") for each in (before, after))
    assert one.keys() == two.keys()
    return [name for name in one if not torch.equal(one[name], two[name])]


if __name__ == "__main__":  # checkpoint writers import this file again
    main(Path(sys.argv[1]), *sys.argv[2:])
