"""Stand-ins for userbuffers: they keep what they were made with, and give Transformer Engine's checks their sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class CommOverlapHelper:
    """Groups of ranks that exchange addresses; nothing is exchanged here."""

    def __init__(self, world_group: object = None, intra_domain_group: object = None) -> None:
        self.groups = world_group, intra_domain_group


class CommOverlap:
    """A buffer of one layer's communication, of which each rank owns the chunk of its sequence."""

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
            # comm_gemm_overlap.cpp: each chunk is the buffer's rows over the ranks.
            raise RuntimeError(f"a userbuffer of {self.shape[0]} rows cannot be cut into chunks for {tp_size} ranks")

    def is_fp8_ubuf(self) -> bool:
        """Whether it holds one byte for each value."""
        return self.dtype.itemsize == 1

    def is_atomic_gemm(self) -> bool:
        """Whether the GEMM signals chunks from within."""
        return bool(self.settings.get("atomic_gemm"))

    def is_p2p_overlap(self) -> bool:
        """Whether neighbours pass chunks on."""
        return False

    def check(self, elements: int, *, local_chunk: bool) -> None:
        """Refuse a tensor of another size than the buffer, or than this rank's chunk of it.

        Source: NVIDIA/TransformerEngine v2.9, pytorch/csrc/extensions/comm_gemm_overlap.cpp: copy_into_buffer and
        get_buffer compare element counts.
        """
        expected = math.prod(self.shape) // (self.tp_size if local_chunk else 1)
        if elements != expected:
            what = "local chunk" if local_chunk else "global tensor"
            raise RuntimeError(f"Userbuffers: the {what} has {elements} elements, and its buffer {expected}")

    def copy_into_buffer(self, tensor: torch.Tensor, local_chunk: bool = False) -> None:
        """Check the size; nothing is copied."""
        self.check(tensor.numel(), local_chunk=local_chunk)

    def get_buffer(self, local_chunk: bool = False, shape: Sequence[int] | None = None) -> torch.Tensor:
        """A tensor of the buffer's shape, or of another one with as many elements."""
        import torch

        own = (self.shape[0] // (self.tp_size if local_chunk else 1), *self.shape[1:])
        if shape is not None:
            self.check(math.prod(shape), local_chunk=local_chunk)
        return torch.empty(tuple(shape or own), dtype=self.dtype, device="meta")

    def get_communication_stream(self) -> tuple[object, object]:
        """Streams for sending and receiving."""
        import torch

        return torch.cuda.current_stream(), torch.cuda.current_stream()


class CommOverlapP2P(CommOverlap):
    """A ring of neighbours."""

    def is_p2p_overlap(self) -> bool:
        """Neighbours pass chunks on."""
        return True
