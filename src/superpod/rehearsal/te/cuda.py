"""Replaces torch.cuda for a build: tensors for the GPU are created on the meta device, with shapes but no memory."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from superpod.rehearsal.patches import torch_cuda
from superpod.rehearsal.patches.registry import patches, rebind, replace
from superpod.rehearsal.te import device

META = "meta"
SHARED_PATCHES = ("cuda-streams", "cuda-tensors")
"""Names of the patches in `rehearsal/patches` that also apply to the meta device."""


def install() -> None:
    """Apply the patches that do not depend on the GPU generation. Call this once per process."""
    import torch

    for registered in patches():
        if registered.name in SHARED_PATCHES:
            registered.apply()
    torch_cuda.replace_by_constants(
        current_device=torch.device(META),
        is_current_stream_capturing=False,
        device_count=8,
        graph_pool_handle=None,
        set_stream=None,
    )
    torch.version.cuda = device.CUDA  # TE supports blockwise scaling from 12.9 on
    replace(
        torch.cuda,
        get_device_properties=lambda *_: device.current_gpu(),
        get_device_capability=lambda *_: (device.current_gpu().major, device.current_gpu().minor),
        get_device_name=lambda *_: device.current_gpu().name,
    )


@functools.cache
def disable_generators() -> None:
    """Replace the RNG states of Megatron and Transformer Engine with constants: the meta device has no generator."""
    import torch
    from megatron.core.tensor_parallel import random

    state = torch.zeros(16, dtype=torch.uint8, device="cpu")
    for module in (random, importlib.import_module("transformer_engine.pytorch.distributed")):
        rebind(module, "_get_cuda_rng_state", torch_cuda.return_constant(state))
        rebind(module, "_set_cuda_rng_state", torch_cuda.return_constant(None))
    for name, value in {"get_rng_state": state, "set_rng_state": None, "manual_seed": None}.items():
        setattr(torch.cuda, name, torch_cuda.return_constant(value))
        setattr(torch.cuda.random, name, torch_cuda.return_constant(value))


def patch_transformer_engine() -> None:
    """Replace the functions of Transformer Engine that use the GPU's index, or create a tensor on the CPU first."""
    import torch

    stand_ins = {
        "_empty_tensor": lambda: torch.empty(0, device=META),
        "canonicalize_device": lambda _device: torch.device(META),
        # The rows of a padded batch that contain tokens: all of them, because the mask has no values.
        "get_indices": lambda longest, ends: torch.empty(((ends.numel() - 1) * longest, 1, 1), dtype=torch.int64),
    }
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine"):
            for function in stand_ins.keys() & vars(module).keys():
                setattr(module, function, stand_ins[function])


def _backward(tensors: Any, grad_tensors: Any = None, *_: Any, **__: Any) -> None:
    """Replace `torch.autograd.backward`, but stay within the active TorchFunctionModes; missing gradients are 1."""
    import torch
    from torch.autograd.graph import _engine_run_backward

    results = tuple(tensors) if isinstance(tensors, (tuple, list)) else (tensors,)
    grads = tuple(grad_tensors) if isinstance(grad_tensors, (tuple, list)) else (grad_tensors,)
    grads = grads if len(grads) == len(results) else (None,) * len(results)
    grads_or_ones = tuple(torch.ones_like(t) if grad is None else grad for t, grad in zip(results, grads, strict=True))
    _engine_run_backward(results, grads_or_ones, False, False, (), allow_unreachable=True, accumulate_grad=True)


@contextlib.contextmanager
def use_meta_device() -> Iterator[None]:
    """Make torch report a GPU within the block, and create its tensors on the meta device."""
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils import _device

    constructors = _device._device_constructors()
    draws = frozenset((torch.Tensor.normal_, torch.Tensor.uniform_, torch.nn.init.normal_))  # 25 % of a build's time

    def to_meta(value: Any) -> Any:
        kind = value.type if isinstance(value, torch.device) else value
        return META if isinstance(kind, str) and kind.partition(":")[0] == "cuda" else value

    class MetaForCuda(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.cpu:
                return args[0]  # for example the initial weights, which NeMo keeps for the optimizer
            if func is torch.autograd.backward:
                with torch.device(META), self:  # torch would run the backward pass outside this mode
                    return _backward(*args, **(kwargs or {}))
            if func is torch.tensor and (kwargs or {}).get("dtype") is torch.int and "device" not in (kwargs or {}):
                kwargs = {**(kwargs or {}), "device": "cpu"}  # Megatron passes a mask's type this way, and reads it
            if func is torch.equal:
                return False  # for example "is the gradient 1?", before a kernel multiplies by it
            if func in draws or (func is torch.Tensor.copy_ and args[1].is_meta):
                # Tensors without memory, such as an activation offloaded to the host, cannot be initialized or copied.
                return args[0] if args else kwargs["tensor"]
            kwargs = dict(kwargs or {})
            if func in constructors or "device" in kwargs:
                kwargs["device"] = to_meta(kwargs.get("device") or META)
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return func(*map(to_meta, args), **kwargs)

    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.Tensor, "is_cuda", property(lambda _: True), create=True),
        MetaForCuda(),
    ):
        yield
