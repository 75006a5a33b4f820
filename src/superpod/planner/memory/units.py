"""Shares and element sizes of weights and activations, from a job and its columns."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from superpod.planner.arrays import Array, Column, Flags
from superpod.planner.columns import Columns
from superpod.planner.planned_job import PlannedJob

NEW = 0.15
"""Version of Megatron-Core where a release does not name an older one."""


@dataclass(frozen=True)
class MemoryUnits:
    """A job and its columns, narrowed to one entry per layout where all pipeline ranks are alike.

    Columns of a layout do not change over the last axis; arithmetic on `[layouts, 1]` is as many times cheaper as
    there are ranks, and numpy broadcasts it against what differs by rank.
    """

    job: PlannedJob
    c: Columns

    def column(self, name: str) -> Column:
        """A column of the layout, last axis of length 1."""
        return getattr(self.c, name)[..., :1]

    @cached_property
    def tp(self) -> Column:
        """Tensor-parallel size, whole numbers."""
        return self.column("tp")

    @cached_property
    def over_tp(self) -> Array:
        """1 / tp: what is split by heads or features."""
        return 1.0 / self.tp

    @cached_property
    def over_sp(self) -> Array:
        """What lies outside tensor-parallel regions: split over tp with sequence parallelism, else whole."""
        return np.where(self.column("sp") > 0, self.over_tp, 1.0)

    @cached_property
    def tokens(self) -> Array:
        """Tokens of a micro-batch on one rank of a context-parallel group."""
        return self.job.seq * self.column("mbs") / self.column("cp")

    @cached_property
    def data_parallel(self) -> Array:
        """Ranks that share the optimizer of dense parameters: dp x cp, over the optimizer's instances."""
        return np.maximum(1, self.column("dp") * self.column("cp") / self.job.options.optimizer_instances)

    @cached_property
    def expert_data_parallel(self) -> Array:
        """Ranks that share the optimizer of routed experts."""
        return np.maximum(1, self.c.edp[..., :1] / self.job.options.optimizer_instances)

    @property
    def unfused(self) -> bool:
        """Whether attention keeps its scores; Megatron's own layers always do."""
        return self.job.keeps_scores

    @cached_property
    def mcore(self) -> float:
        """Version of Megatron-Core, where the run's release is known to be an old one; else a new one."""
        match = re.match(r"mcore (\d+\.\d+)", self.job.options.release)
        return float(match[1]) if match else NEW

    @cached_property
    def is_fp8(self) -> bool:
        """Whether matrix products run in FP8 or FP4."""
        return self.job.precision.startswith(("fp8", "mxfp8", "nvfp4"))

    @cached_property
    def wide(self) -> int:
        """Bytes of an activation: 4 in fp32 and tf32, else 2."""
        whole = self.job.precision in ("fp32", "tf32") or (self.is_fp8 and self.job.options.unquantised == "fp32")
        return 4 if whole else 2

    @cached_property
    def narrow(self) -> float:
        """Bytes of an element kept as a matrix product's input: quantised in FP8, scales of blocks included."""
        kept = {"mxfp8": 1 + 1 / 32, "fp8bw": 1 + 4 / 128, "nvfp4": 0.5 + 1 / 16}
        return kept.get(self.job.precision, 1.0 if self.is_fp8 else float(self.wide))

    def input_of(self, target: str) -> float:
        """Bytes per element of a product's input that is kept for its weight's gradient.

        Under LoRA the weights are frozen: only an adapter beside the product (`lora_targets`) keeps its input, never in
        FP8 (NeMo's adapters are no Transformer Engine layers), and after dropout with a mask.
        """
        o = self.job.options
        if self.job.task != "lora":
            return self.narrow
        return self.wide + (o.lora_dropout > 0) if target in o.lora_targets else 0.0

    @cached_property
    def fp8_copies(self) -> int:
        """Copies of a weight that FP8 keeps: rowwise, and columnwise where products need it or scales differ.

        Hopper and Ada multiply FP8 in one memory order only, so that the backward pass takes a transposed copy;
        block-scaled formats quantise along each direction (Transformer Engine 2.x, `pytorch/tensor`).
        """
        plain = self.job.precision in ("fp8", "fp8cs", "fp8ds")
        return 1 if plain and self.job.node.gpu.fp8_any_order else 2

    @cached_property
    def scores(self) -> int:
        """Bytes per head, query and key that unfused attention keeps: softmax, and with dropout its mask and output.

        A soft cap keeps its tanh as well.
        """
        dropped = 1 + self.wide if self.job.options.attention_dropout else 0
        return self.wide + dropped + self.wide * self.job.model.soft_capped

    @cached_property
    def score_gradients(self) -> int:
        """Bytes per head, query and key that unfused attention's backward pass holds at once, and its product's buffer.

        A soft cap's backward pass goes in steps, each from a gradient to a new one; the buffer into which Megatron
        multiplies is never given back (utils.py, GlobalMemoryBuffer).
        """
        capped = 2 * self.wide * self.job.model.soft_capped
        return self.wide * (1 + (self.job.options.attention_dropout > 0)) + capped

    def recomputes(self, module: str) -> Flags:
        """Where selective recomputation takes a module of `layout.MODULES`, one entry per layout."""
        return self.c.recomputes(module)[..., :1]
