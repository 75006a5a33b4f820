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
        """Return a column that does not depend on the rank, with a last axis of length 1."""
        return getattr(self.c, name)[..., :1]

    @cached_property
    def tp(self) -> Column:
        """Tensor-parallel size of each layout."""
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
        """Whether attention stores its scores for the backward pass; Megatron's local layers always do."""
        return self.job.keeps_scores

    @cached_property
    def mcore(self) -> float:
        """Version of Megatron-Core such as 0.12, from the release of the run if it names one."""
        match = re.match(r"mcore (\d+\.\d+)", self.job.options.release)
        return float(match[1]) if match else DEFAULT_MCORE

    @cached_property
    def is_fp8(self) -> bool:
        """Whether GEMMs run in FP8 or FP4."""
        return self.job.precision.startswith(("fp8", "mxfp8", "nvfp4"))

    @cached_property
    def act_bytes(self) -> int:
        """Bytes per element of an activation: 4 in fp32 and tf32, else 2."""
        is_fp32 = self.job.precision in ("fp32", "tf32") or (self.is_fp8 and self.job.options.unquantised == "fp32")
        return 4 if is_fp32 else 2

    @cached_property
    def gemm_input_bytes(self) -> float:
        """Bytes per element of a GEMM input kept for the backward pass: in FP8 quantized, with its block scales."""
        kept = {"mxfp8": 1 + 1 / 32, "fp8bw": 1 + 4 / 128, "nvfp4": 0.5 + 1 / 16}
        return kept.get(self.job.precision, 1.0 if self.is_fp8 else float(self.act_bytes))

    def saved_input_bytes(self, target: str) -> float:
        """Return the bytes per element that the linear layer `target` keeps of its input for the weight gradient.

        With LoRA, weights are frozen, and only adapters (`lora_targets`) keep their input: not in FP8, because NeMo's
        adapters are not Transformer Engine layers, and with a mask if there is dropout.
        """
        o = self.job.options
        if self.job.task != "lora":
            return self.gemm_input_bytes
        return self.act_bytes + (o.lora_dropout > 0) if target in o.lora_targets else 0.0

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
        dropped = 1 + self.act_bytes if self.job.options.attention_dropout else 0
        return self.act_bytes + dropped + self.act_bytes * self.job.model.soft_capped

    @cached_property
    def score_gradients(self) -> int:
        """Bytes per head, query and key during the backward pass of unfused attention, including its GEMM buffer.

        The backward pass of soft capping has several steps, each of which creates a new gradient; the buffer for
        Megatron's GEMM is never freed (utils.py, GlobalMemoryBuffer).
        """
        capped = 2 * self.act_bytes * self.job.model.soft_capped
        return self.act_bytes * (1 + (self.job.options.attention_dropout > 0)) + capped

    def recomputes(self, module: str) -> Flags:
        """Return whether selective recomputation includes a module of `layout.MODULES`, one entry per layout."""
        return self.c.recomputes(module)[..., :1]
