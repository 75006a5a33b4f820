"""Records how Transformer Engine's layers are constructed: layers with equal records have the same configuration."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

LAYERS = ("Linear", "LayerNormLinear", "GroupedLinear", "LayerNormMLP", "LayerNorm", "RMSNorm", "DotProductAttention")
"""Classes of transformer_engine.pytorch that Megatron and NeMo build."""


@contextlib.contextmanager
def record_layers(context: str) -> Iterator[set[str]]:
    """Yield a set that collects the digests of all layers constructed within the block; each includes `context`."""
    te: Any = importlib.import_module("transformer_engine.pytorch")

    digests: set[str] = set()
    with contextlib.ExitStack() as stack:
        for name in LAYERS:
            layer = getattr(te, name)
            constructor = _wrap_constructor(layer.__init__, name, context, digests)
            stack.enter_context(mock.patch.object(layer, "__init__", constructor))
        yield digests


def _wrap_constructor(original: Any, name: str, context: str, digests: set[str]) -> Any:
    """Wrap the constructor of the class `name` so that it adds the digest of its arguments to `digests`."""
    signature = inspect.signature(original)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        arguments = signature.bind(self, *args, **kwargs).arguments
        # TE uses the layer number only if NVTE_APPLY_QK_LAYER_SCALING is set.
        for excluded in ("self", "layer_number"):
            arguments.pop(excluded, None)
        text = f"{context} {name} {sorted((key, _to_text(value)) for key, value in arguments.items())}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        digests.add(digest)
        original(self, *args, **kwargs)
        self.made_with = digest

    return init


def hash_parameters(chunks: Iterable[Any]) -> str:
    """Return a digest of the names, shapes and types of all parameters in a rank's model chunks."""
    digest = hashlib.sha256()
    for stage, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            digest.update(f"{stage} {name} {tuple(parameter.size())} {parameter.dtype}\n".encode())
    return digest.hexdigest()[:16]


def hash_layer(layer: Any, config: Any) -> str:
    """Return a digest of a layer's modules and of the settings for its layer number."""
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    number = getattr(layer, "layer_number", 1) - 1
    no_rope = getattr(config, "no_rope_freq", None)
    without_rope = no_rope[number] if isinstance(no_rope, list) and number < len(no_rope) else None
    lines = [str(is_first_last_bf16_layer(config, number)), str(without_rope)]
    for name, module in layer.named_modules():
        shapes = [f"{type(weight).__name__}{tuple(weight.size())}" for weight in module.parameters(recurse=False)]
        lines.append(f"{name} {type(module).__qualname__} {getattr(module, 'made_with', '')} {shapes}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _to_text(value: Any) -> str:
    """Convert a constructor's argument to text that is the same in every process; a process group becomes its size."""
    if callable(getattr(value, "size", None)) and hasattr(value, "rank"):
        return f"group of {value.size()}"
    if isinstance(value, dict):
        return str(sorted((key, _to_text(entry)) for key, entry in value.items()))
    if isinstance(value, list):
        return str([_to_text(entry) for entry in value])
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    if type(value).__repr__ is object.__repr__:  # for example a stream, whose text would contain its address
        return type(value).__qualname__
    return str(value)
