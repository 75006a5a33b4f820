"""Patches of Megatron-Core: random numbers and norms."""

import contextlib
from collections.abc import Iterator
from typing import Any

from superpod.rehearsal.registry import patch, rebind, replace


@patch(
    "rng-tracker",
    target="megatron.core.tensor_parallel.random: CudaRNGStatesTracker.fork, _get/_set_cuda_rng_state",
    reason="tensor-parallel ranks draw from their own generator states; the originals address a CUDA generator",
)
def _rng_tracker() -> None:
    import torch
    from megatron.core.tensor_parallel import random

    generator = torch.default_generator

    def get_state(*_: Any, **__: Any) -> Any:
        return generator.get_state()

    def set_state(state: Any, *_: Any, **__: Any) -> None:
        generator.set_state(state)

    @contextlib.contextmanager
    def fork(self: Any, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        outside = generator.get_state()
        generator.set_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = generator.get_state()
            generator.set_state(outside)

    rebind(random, "_get_cuda_rng_state", get_state)
    rebind(random, "_set_cuda_rng_state", set_state)
    replace(random.CudaRNGStatesTracker, fork=fork)


@patch(
    "recompute-fp8",
    target="megatron.core.tensor_parallel.random.CheckpointWithoutOutput.__init__",
    reason="it takes fp8=False for FP8, and asks Transformer Engine's FP8 state: a norm or an activation could not be "
    "recomputed without TE",
)
def _recompute_fp8() -> None:
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    original = CheckpointWithoutOutput.__init__

    def init(self: Any, fp8: Any = None) -> None:
        original(self, None)  # a rehearsal computes nothing in FP8

    replace(CheckpointWithoutOutput, __init__=init)


@patch(
    "torch-norm",
    target="megatron.core.transformer.torch_norm.WrappedTorchNorm",
    reason="Megatron's torch norm refuses sequence parallelism and zero-centred weights; TE's norm, which a GPU "
    "run uses, marks its weights so that their gradients are summed over the tensor-parallel ranks",
)
def _torch_norm() -> None:
    from megatron.core.transformer.torch_norm import L2Norm, WrappedTorchNorm

    def new(_cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        if config.normalization == "L2Norm":
            return L2Norm(hidden_size, eps)
        return norm_class()(config, hidden_size, eps)

    replace(WrappedTorchNorm, __new__=new)


def norm_class() -> type:
    """A norm with TE's parameter names and marks: ``weight`` and, for LayerNorm, ``bias``."""
    import torch

    class Norm(torch.nn.Module):
        def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
            super().__init__()
            self.config, self.eps = config, eps
            add_norm_parameters(self, config, hidden_size, prefix="")

        def forward(self, x: Any) -> Any:
            return normalize(x, self.config, self.eps, self.weight, getattr(self, "bias", None))

    return Norm


def add_norm_parameters(module: Any, config: Any, hidden_size: int, *, prefix: str) -> None:
    """Give ``module`` the parameters of a norm, as TE names and marks them."""
    import torch

    fill = torch.zeros if config.layernorm_zero_centered_gamma else torch.ones
    names = {"weight": fill} if config.normalization == "RMSNorm" else {"weight": fill, "bias": torch.zeros}
    for name, make in names.items():
        parameter: Any = torch.nn.Parameter(make(hidden_size, dtype=config.params_dtype))
        parameter.sequence_parallel = config.sequence_parallel  # Megatron sums the gradient over TP where it is set
        setattr(module, prefix + name, parameter)


def normalize(x: Any, config: Any, eps: float, weight: Any, bias: Any) -> Any:
    """RMSNorm or LayerNorm of the last dimension of ``x``, as ``config`` says."""
    import torch.nn.functional as F

    if config.layernorm_zero_centered_gamma:
        weight = weight + 1
    if config.normalization == "RMSNorm":
        return F.rms_norm(x, (x.size(-1),), weight, eps)
    return F.layer_norm(x, (x.size(-1),), weight, bias, eps)
