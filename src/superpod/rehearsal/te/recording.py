"""Records what Transformer Engine's layers are made with: two layers with equal records are one configuration."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

LAYERS = ("Linear", "LayerNormLinear", "GroupedLinear", "LayerNormMLP", "LayerNorm", "RMSNorm", "DotProductAttention")
"""Classes of transformer_engine.pytorch that Megatron and NeMo build."""


@contextlib.contextmanager
def recorded(context: str) -> Iterator[set[str]]:
    """The digests of all layers that are made within it, with `context` in each."""
    te: Any = importlib.import_module("transformer_engine.pytorch")

    digests: set[str] = set()
    originals = {name: vars(getattr(te, name))["__init__"] for name in LAYERS}
    for name, original in originals.items():
        setattr(getattr(te, name), "__init__", _recording(original, name, context, digests))  # noqa: B010
    try:
        yield digests
    finally:
        for name, original in originals.items():
            setattr(getattr(te, name), "__init__", original)  # noqa: B010


def _recording(original: Any, name: str, context: str, digests: set[str]) -> Any:
    signature = inspect.signature(original)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        arguments = signature.bind(self, *args, **kwargs).arguments
        for dropped in ("self", "layer_number"):  # TE scales by the number only if NVTE_APPLY_QK_LAYER_SCALING is set
            arguments.pop(dropped, None)
        text = f"{context} {name} {sorted((key, _word(value)) for key, value in arguments.items())}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        digests.add(digest)
        original(self, *args, **kwargs)
        self.made_with = digest

    return init


def of_parameters(chunks: Iterable[Any]) -> str:
    """Digest of the names, shapes and types of the parameters of a rank's chunks."""
    digest = hashlib.sha256()
    for stage, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            digest.update(f"{stage} {name} {tuple(parameter.size())} {parameter.dtype}\n".encode())
    return digest.hexdigest()[:16]


def of_modules(layer: Any, config: Any) -> str:
    """What a layer's forward pass depends on: its modules with what they were made with, and its place's settings."""
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    number = getattr(layer, "layer_number", 1) - 1
    words = [str(is_first_last_bf16_layer(config, number)), str(_at(getattr(config, "no_rope_freq", None), number))]
    for name, module in layer.named_modules():
        shapes = [f"{type(weight).__name__}{tuple(weight.size())}" for weight in module.parameters(recurse=False)]
        words.append(f"{name} {type(module).__qualname__} {getattr(module, 'made_with', '')} {shapes}")
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


def _at(values: Any, number: int) -> Any:
    return values[number] if isinstance(values, list) and number < len(values) else None


def _word(value: Any) -> str:
    """A value that means the same in every process: numbers and names themselves, groups by their size."""
    if callable(getattr(value, "size", None)) and hasattr(value, "rank"):
        return f"group of {value.size()}"
    if isinstance(value, dict):
        return str(sorted((key, _word(entry)) for key, entry in value.items()))
    if isinstance(value, list):
        return str([_word(entry) for entry in value])
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    if type(value).__repr__ is object.__repr__:  # such as the stream of context parallelism: its address is no fact
        return type(value).__qualname__
    return str(value)
