"""Changes of a Hugging Face folder: other files, and what is broken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Change = Callable[[Path], None]


def drop(*names: str) -> Change:
    def change(folder: Path) -> None:
        for name in names:
            for file in folder.glob(name):
                file.unlink()

    return change


def sharded(folder: Path) -> None:
    load(folder).save_pretrained(folder, max_shard_size="100KB")
    (folder / "model.safetensors").unlink(missing_ok=True)


def shard_lost(folder: Path) -> None:
    sharded(folder)
    sorted(folder.glob("model-*.safetensors"))[1].unlink()


def bin(folder: Path) -> None:
    import torch

    torch.save(load(folder).state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def bin_own_head(folder: Path) -> None:
    import torch

    state = load(folder).state_dict()
    own_head(state)
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def tensors(edit: Callable[[dict[str, Any]], object]) -> Change:
    def change(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def widen(tensors: dict[str, Any]) -> None:
    for name in [name for name in tensors if "norm" in name]:
        tensors[name] = tensors[name].float()


def nan(tensors: dict[str, Any]) -> None:
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = float("nan")


def crop(tensors: dict[str, Any]) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name][:, :-1].contiguous()


def one_expert_less(tensors: dict[str, Any]) -> None:
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]


def extra(tensors: dict[str, Any]) -> None:
    tensors["model.layers.0.self_attn.q_norm.weight"] = tensors["model.norm.weight"].clone()


def scales(tensors: dict[str, Any]) -> None:
    tensors["model.layers.0.self_attn.q_proj.weight_scales"] = tensors["model.norm.weight"].clone()


def own_head(tensors: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()


def twice(folder: Path) -> None:
    sharded(folder)
    first, second = sorted(folder.glob("model-*.safetensors"))[:2]
    from safetensors.torch import load_file, save_file

    save_file(load_file(first) | load_file(second), second, metadata={"format": "pt"})


def mxfp4(folder: Path) -> None:
    """gpt-oss as it is published: experts in blocks of 32 numbers of 4 bits with a common scale."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = (experts, rows, columns // 32, 16)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, blocks, generator=generator).to(torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(122, 125, blocks[:3], generator=generator).to(torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def rotary_buffers(tensors: dict[str, Any]) -> None:
    import torch

    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, torch_dtype="auto")


def adapter_only(folder: Path) -> None:
    drop("config.json", "model.safetensors")(folder)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
