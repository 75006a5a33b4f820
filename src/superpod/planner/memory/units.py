"""Fractions per rank and element sizes of weights and activations, from a job and its columns."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from superpod.planner.arrays import Array, Column, Flags
from superpod.planner.columns import Columns
from superpod.planner.planned_job import PlannedJob

DEFAULT_MCORE = 0.15
"""Version of Megatron-Core, unless the release names an older one."""


@dataclass(frozen=True)
class MemoryUnits:
    """A job and its columns, reduced to one entry per layout for values that are the same on all pipeline ranks.

    Such columns are constant over the last axis, so arithmetic on shape `[layouts, 1]` is faster by a factor of the
    number of ranks; numpy broadcasts the results to values that differ per rank.
    """

    job: PlannedJob
    c: Columns

    def column(self, name: str) -> Column:
        """Return a column that is the same on all ranks; its last axis has length 1."""
        return getattr(self.c, name)[..., :1]

    @cached_property
    def tp(self) -> Column:
        """Tensor-parallel size, integers."""
        return self.column("tp")

    @cached_property
    def over_tp(self) -> Array:
        """1 / tp, the fraction of tensors that are split by heads or features."""
        return 1.0 / self.tp

    @cached_property
    def over_sp(self) -> Array:
        """Fraction of tensors outside tensor-parallel regions: 1 / tp with sequence parallelism, else 1."""
        return np.where(self.column("sp") > 0, self.over_tp, 1.0)

    @cached_property
    def tokens(self) -> Array:
        """Tokens of a micro-batch on one context-parallel rank."""
        return self.job.seq * self.column("mbs") / self.column("cp")

    @cached_property
    def data_parallel(self) -> Array:
        """Number of ranks that share the optimizer states of dense parameters: dp x cp / optimizer instances."""
        return np.maximum(1, self.column("dp") * self.column("cp") / self.job.options.optimizer_instances)

    @cached_property
    def expert_data_parallel(self) -> Array:
        """Number of ranks that share the optimizer states of routed experts."""
        return np.maximum(1, self.c.edp[..., :1] / self.job.options.optimizer_instances)

    @property
    def unfused(self) -> bool:
        """Whether the attention scores are stored for the backward pass, as always in Megatron's local layers."""
        return self.job.keeps_scores

    @cached_property
    def mcore(self) -> float:
        """Version of Megatron-Core, if the release of the run names it; else the default."""
        match = re.match(r"mcore (\d+\.\d+)", self.job.options.release)
        return float(match[1]) if match else DEFAULT_MCORE

    @cached_property
    def is_fp8(self) -> bool:
        """Whether GEMMs run in FP8 or FP4."""
        return self.job.precision.startswith(("fp8", "mxfp8", "nvfp4"))

    @cached_property
    def wide(self) -> int:
        """Bytes per element of an activation: 4 in fp32 and tf32, else 2."""
        whole = self.job.precision in ("fp32", "tf32") or (self.is_fp8 and self.job.options.unquantised == "fp32")
        return 4 if whole else 2

    @cached_property
    def narrow(self) -> float:
        """Bytes per element of a GEMM input kept for the backward pass: quantized in FP8, including block scales."""
        kept = {"mxfp8": 1 + 1 / 32, "fp8bw": 1 + 4 / 128, "nvfp4": 0.5 + 1 / 16}
        return kept.get(self.job.precision, 1.0 if self.is_fp8 else float(self.wide))

    def input_of(self, target: str) -> float:
        """Return the bytes per element of a GEMM input that is kept for the weight gradient.

        With LoRA, weights are frozen: only adapters (`lora_targets`) keep their input, never in FP8 (NeMo's adapters
        are not Transformer Engine layers), and with a mask if there is dropout.
        """
        o = self.job.options
        if self.job.task != "lora":
            return self.narrow
        return self.wide + (o.lora_dropout > 0) if target in o.lora_targets else 0.0

    @cached_property
    def fp8_copies(self) -> int:
        """Number of copies of a weight in FP8: row-wise, and column-wise if GEMMs need it or scales differ.

        Hopper and Ada support FP8 GEMMs in one memory order only, so the backward pass needs a transposed copy;
        block-scaled formats are quantized in each direction (Transformer Engine 2.x, `pytorch/tensor`).
        """
        plain = self.job.precision in ("fp8", "fp8cs", "fp8ds")
        return 1 if plain and self.job.node.gpu.fp8_any_order else 2

    @cached_property
    def scores(self) -> int:
        """Bytes per head, query and key that unfused attention keeps: softmax, and with dropout its mask and output.

        Soft capping also keeps the output of tanh.
        """
        dropped = 1 + self.wide if self.job.options.attention_dropout else 0
        return self.wide + dropped + self.wide * self.job.model.soft_capped

    @cached_property
    def score_gradients(self) -> int:
        """Bytes per head, query and key during the backward pass of unfused attention, including its GEMM buffer.

        The backward pass of soft capping has several steps, each of which creates a new gradient; the buffer for
        Megatron's GEMM is never freed (utils.py, GlobalMemoryBuffer).
        """
        capped = 2 * self.wide * self.job.model.soft_capped
        return self.wide * (1 + (self.job.options.attention_dropout > 0)) + capped

    def recomputes(self, module: str) -> Flags:
        """Return whether selective recomputation includes a module of `layout.MODULES`, one entry per layout."""
        return self.c.recomputes(module)[..., :1]
