"""Patches of megatron/core/tensor_parallel/random.py: random number generators and recomputation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from superpod.rehearsal.patches.registry import patch, rebind, replace
from superpod.rehearsal.patches.torch_cuda import get_rng_state, set_rng_state

if TYPE_CHECKING:
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput, CudaRNGStatesTracker


@patch(
    "rng-tracker",
    target="megatron.core.tensor_parallel.random: CudaRNGStatesTracker.fork, _get/_set_cuda_rng_state",
    reason="tensor-parallel ranks have their own generator states, and the original functions use a CUDA generator",
)
def _patch_rng_tracker() -> None:
    import torch
    from megatron.core.tensor_parallel import random

    generator = torch.default_generator

    @contextlib.contextmanager
    def fork(self: CudaRNGStatesTracker, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        outer_state = generator.get_state()
        generator.set_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = generator.get_state()
            generator.set_state(outer_state)

    rebind(random, "_get_cuda_rng_state", get_rng_state)
    rebind(random, "_set_cuda_rng_state", set_rng_state)
    replace(random.CudaRNGStatesTracker, fork=fork)


@patch(
    "recompute-fp8",
    target="megatron.core.tensor_parallel.random.CheckpointWithoutOutput.__init__",
    reason="it treats fp8=False as FP8 and reads Transformer Engine's FP8 state, so that norms and activations could "
    "not be recomputed without TE",
)
def _patch_recompute_fp8() -> None:
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    original: Callable[..., None] = CheckpointWithoutOutput.__init__

    def init(self: CheckpointWithoutOutput, fp8: object = None) -> None:
        original(self, None)  # a rehearsal computes nothing in FP8

    replace(CheckpointWithoutOutput, __init__=init)
