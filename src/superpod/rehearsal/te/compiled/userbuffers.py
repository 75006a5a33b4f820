"""Replaces TE's userbuffers with ones that have sizes but no memory, so that TE's checks are executed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class CommOverlapHelper:
    """Replaces the class that holds the process groups whose ranks exchange buffer addresses."""

    def __init__(self, world_group: object = None, intra_domain_group: object = None) -> None:
        self.groups = world_group, intra_domain_group


class CommOverlap:
    """A userbuffer: the communication buffer of a layer, in which each rank owns one chunk of the sequence.

    Raises:
        RuntimeError: the rows of the buffer are not a multiple of the tensor-parallel size.
    """

    def __init__(
        self,
        buffer_shape: Sequence[int],
        buffer_dtype: torch.dtype,
        helper: CommOverlapHelper,
        tp_size: int,
        *_: object,
        **settings: object,
    ) -> None:
        self.shape, self.dtype, self.tp_size, self.settings = tuple(buffer_shape), buffer_dtype, tp_size, settings
        if self.shape[0] % tp_size:
            # comm_gemm_overlap.cpp divides the rows of the buffer by the number of ranks.
            raise RuntimeError(f"a userbuffer of {self.shape[0]} rows cannot be divided among {tp_size} ranks")

    def is_fp8_ubuf(self) -> bool:
        """Return whether an element of the buffer has one byte."""
        return self.dtype.itemsize == 1

    def is_atomic_gemm(self) -> bool:
        """Return whether the GEMM kernel itself signals completed chunks."""
        return bool(self.settings.get("atomic_gemm"))

    def is_p2p_overlap(self) -> bool:
        """Return whether chunks are passed between neighbors in a ring."""
        return False

    def check(self, elements: int, *, local_chunk: bool) -> None:
        """Require that a tensor has as many elements as the buffer, or as this rank's chunk if `local_chunk`.

        Source: NVIDIA/TransformerEngine v2.9, pytorch/csrc/extensions/comm_gemm_overlap.cpp, copy_into_buffer and
        get_buffer.

        Raises:
            RuntimeError: the numbers differ.
        """
        expected = math.prod(self.shape)
        part = "global tensor"
        if local_chunk:
            expected //= self.tp_size
            part = "local chunk"
        if elements != expected:
            raise RuntimeError(f"Userbuffers: the {part} has {elements} elements, but its buffer has {expected}")

    def copy_into_buffer(self, tensor: torch.Tensor, local_chunk: bool = False) -> None:
        """Check the size of a tensor without copying it."""
        self.check(tensor.numel(), local_chunk=local_chunk)

    def get_buffer(self, local_chunk: bool = False, shape: Sequence[int] | None = None) -> torch.Tensor:
        """Return a tensor of the buffer's shape, or of another shape with the same number of elements."""
        import torch

        local_shape = (self.shape[0] // (self.tp_size if local_chunk else 1), *self.shape[1:])
        if shape is not None:
            self.check(math.prod(shape), local_chunk=local_chunk)
        return torch.empty(tuple(shape or local_shape), dtype=self.dtype, device="meta")

    def get_communication_stream(self) -> tuple[object, object]:
        """Return the CUDA streams for sending and receiving."""
        import torch

        return torch.cuda.current_stream(), torch.cuda.current_stream()


class CommOverlapP2P(CommOverlap):
    """A userbuffer whose chunks are passed between neighbors in a ring."""

    def is_p2p_overlap(self) -> bool:
        """Return True, because chunks are passed between neighbors in a ring."""
        return True
