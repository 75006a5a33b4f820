"""Patches of torch.cuda, which Megatron calls without checking for a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

from superpod.rehearsal.patches.registry import patch, replace

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

CONSTANTS: dict[str, object] = {
    **dict.fromkeys(("_lazy_init", "empty_cache", "set_device", "reset_peak_memory_stats")),
    **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0),
    "is_initialized": True,
}
"""{function of torch.cuda: its result without a GPU}."""


class _Stream:
    """A stream without pending work: CPU work is synchronous."""

    cuda_stream = 0

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, *_: object) -> None: ...

    def wait_event(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *_: object) -> _Event:
        return _Event()


class _Event:
    """An event that has already occurred."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def wait(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, _: object) -> float:
        return 0.0


def return_constant(value: T) -> Callable[..., T]:
    """Create a new function that ignores its arguments and returns `value`."""
    return lambda *_, **__: value


def replace_by_constants(**more: object) -> None:
    """Replace the functions of torch.cuda in `CONSTANTS` and `more` by functions that return the given values."""
    import torch

    # A function for each name, because torch._dynamo rejects a function with two names.
    replace(torch.cuda, **{name: return_constant(value) for name, value in (CONSTANTS | more).items()})


@patch(
    "cuda-streams",
    target="torch.cuda: Stream, Event, stream, current_stream, synchronize",
    reason="Megatron orders overlapped communication with streams; on a CPU all operations are in order",
)
def _patch_streams() -> None:
    import torch

    replace(
        torch.cuda,
        Stream=_Stream,
        Event=_Event,
        stream=lambda _stream: contextlib.nullcontext(),
        current_stream=lambda *_, **__: _Stream(),
        default_stream=lambda *_, **__: _Stream(),
        synchronize=return_constant(None),
    )


@patch(
    "cuda-device",
    target="torch.cuda: current_device, set_device, get_device_properties, get_device_capability, memory figures",
    reason="Megatron allocates on torch.cuda.current_device() and reads the device's capability",
)
def _patch_device() -> None:
    import torch

    properties = SimpleNamespace(name="rehearsal", major=9, minor=0)
    replace_by_constants(
        current_device=torch.device("cpu"), get_device_capability=(9, 0), get_device_properties=properties
    )


@patch(
    "cuda-tensors",
    target="torch: Tensor.cuda, Module.cuda, Tensor.pin_memory, torch.cuda.FloatTensor",
    reason="moving a tensor to the GPU returns the CPU tensor itself",
)
def _patch_tensors() -> None:
    import torch

    def itself(self: T, *_: object, **__: object) -> T:
        return self

    replace(torch.Tensor, cuda=itself, pin_memory=itself)
    replace(torch.nn.Module, cuda=itself)
    for kind in ("Float", "Long", "Int", "Byte", "Double", "Half", "BFloat16"):
        replace(torch.cuda, **{f"{kind}Tensor": getattr(torch, f"{kind}Tensor")})


@patch(
    "cuda-literals",
    target="every torch function: device='cuda', pin_memory=True; Tensor.type()",
    reason="Megatron and NeMo pass device='cuda', and the loss scaler and the gradient norm assert "
    "the type name 'torch.cuda.FloatTensor'",
)
def _patch_literals() -> None:
    import torch
    from torch.overrides import TorchFunctionMode

    def on_cpu(value: object) -> object:
        kind = value.type if isinstance(value, torch.device) else value
        return "cpu" if isinstance(kind, str) and kind.partition(":")[0] == "cuda" else value

    class CpuForCuda(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if "device" in kwargs:
                kwargs["device"] = on_cpu(kwargs["device"])
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            out = func(*map(on_cpu, args), **kwargs)
            if func is torch.Tensor.type and isinstance(out, str):
                return out.replace("torch.", "torch.cuda.")
            return out

    CpuForCuda().__enter__()  # never exited, because the entire process is a rehearsal


@patch(
    "cuda-rng",
    target="torch.cuda: get_rng_state, set_rng_state, manual_seed",
    reason="without a GPU, the CPU's generator replaces that of the GPU",
)
def _patch_rng() -> None:
    import torch

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(int(value))

    for module in (torch.cuda, torch.cuda.random):
        replace(module, get_rng_state=get_rng_state, set_rng_state=set_rng_state, manual_seed=seed)


def get_rng_state(*_: object, **__: object) -> torch.Tensor:
    """Return the state of the CPU's generator, for any GPU."""
    import torch

    return torch.default_generator.get_state()


def set_rng_state(state: torch.Tensor, *_: object, **__: object) -> None:
    """Set the state of the CPU's generator, for any GPU."""
    import torch

    torch.default_generator.set_state(state)
