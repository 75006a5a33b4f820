"""Substitutes for userbuffers with sizes but no memory, so that Transformer Engine's checks are executed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class CommOverlapHelper:
    """Substitute for the groups of ranks that exchange addresses."""

    def __init__(self, world_group: object = None, intra_domain_group: object = None) -> None:
        self.groups = world_group, intra_domain_group


class CommOverlap:
    """The communication buffer of a layer; each rank owns the chunk for its part of the sequence."""

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
        """Return whether elements have one byte."""
        return self.dtype.itemsize == 1

    def is_atomic_gemm(self) -> bool:
        """Return whether the GEMM itself signals completed chunks."""
        return bool(self.settings.get("atomic_gemm"))

    def is_p2p_overlap(self) -> bool:
        """Return whether chunks are passed between neighbors in a ring."""
        return False

    def check(self, elements: int, *, local_chunk: bool) -> None:
        """Require that a tensor has the size of the buffer, or of this rank's chunk.

        Source: NVIDIA/TransformerEngine v2.9, pytorch/csrc/extensions/comm_gemm_overlap.cpp: copy_into_buffer and
        get_buffer compare element counts.
        """
        expected = math.prod(self.shape)
        part = "global tensor"
        if local_chunk:
            expected //= self.tp_size
            part = "local chunk"
        if elements != expected:
            raise RuntimeError(f"Userbuffers: the {part} has {elements} elements, but its buffer has {expected}")

    def copy_into_buffer(self, tensor: torch.Tensor, local_chunk: bool = False) -> None:
        """Check the size; nothing is copied."""
        self.check(tensor.numel(), local_chunk=local_chunk)

    def get_buffer(self, local_chunk: bool = False, shape: Sequence[int] | None = None) -> torch.Tensor:
        """Return a tensor of the buffer's shape, or of another shape with the same number of elements."""
        import torch

        local_shape = (self.shape[0] // (self.tp_size if local_chunk else 1), *self.shape[1:])
        if shape is not None:
            self.check(math.prod(shape), local_chunk=local_chunk)
        return torch.empty(tuple(shape or local_shape), dtype=self.dtype, device="meta")

    def get_communication_stream(self) -> tuple[object, object]:
        """Return the streams for sending and receiving."""
        import torch

        return torch.cuda.current_stream(), torch.cuda.current_stream()


class CommOverlapP2P(CommOverlap):
    """A buffer for communication in a ring."""

    def is_p2p_overlap(self) -> bool:
        """Return True: chunks are passed between neighbors."""
        return True
