"""Stand-ins for the few names of NeMo and Megatron that conversions ask for, so that their own rules run without."""

import sys
from types import ModuleType
from typing import Any

import torch


class LoRALinear(torch.nn.Module):
    """NeMo's: a layer and the adapter beside it."""

    def __init__(self, to_wrap: torch.nn.Module, adapter: torch.nn.Module) -> None:
        super().__init__()
        self.to_wrap, self.adapter = to_wrap, adapter


class DoRALinear(LoRALinear):
    """The same with a learnt magnitude of each row."""


class Adapter(torch.nn.Module):
    """Two matrices, their rank and their scale."""

    def __init__(self, rows: int, columns: int, dim: int, alpha: int, magnitude: torch.Tensor | None = None) -> None:
        super().__init__()
        self.linear_in = torch.nn.Linear(columns, dim, bias=False)
        self.linear_out = torch.nn.Linear(dim, rows, bias=False)
        self.dim, self.alpha = dim, alpha
        if magnitude is not None:
            self.get_weight_magnitude = lambda: magnitude


def is_layer_window_attention(window_size: Any, skips: Any, layer: int) -> bool:
    """Megatron-Core 0.15.3, transformer/utils.py: a list has an entry for each layer, a number skips every n-th."""
    if not window_size:
        return False
    if skips is None:
        return True
    return layer % skips != 0 if isinstance(skips, int) else bool(skips[layer - 1])


def install(monkeypatch: Any) -> None:
    """Put them where the imports look, until the end of a test."""
    modules = {
        "nemo.collections.llm.peft.lora": {"LoRALinear": LoRALinear},
        "nemo.collections.llm.peft.dora": {"DoRALinear": DoRALinear},
        "megatron.core.transformer.utils": {"is_layer_window_attention": is_layer_window_attention},
        "nemo.collections.llm.fn.activation": {"openai_gelu": openai_gelu, "squared_relu": squared_relu},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)


def openai_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU's tanh approximation."""
    return torch.nn.functional.gelu(x, approximate="tanh")


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """ReLU, squared."""
    return torch.relu(x) ** 2
