"""Collect the cost of one block of a layer: seconds per resource, for forward, backward and recomputation.

`blocks.py` counts operations: GEMMs and fused attention in measured kernel time (`kernel_times.py`), all others in
ideal time: bytes at HBM bandwidth, bytes on each tier of links, launches. `calibration.py` has one factor per resource
for the difference from training. All values are arrays over `KernelUnits`, the few distinct combinations of tp, cp, ep,
mbs, ... in a table of layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from superpod.planner.arrays import Array, Column, Flags, Number
from superpod.planner.calibration import calibration
from superpod.planner.layout import MODULES
from superpod.planner.planned_job import PlannedJob
from superpod.planner.timing import collectives, kernel_times

KINDS = ("attention", "mla", "mamba", "delta", "mlp", "moe", "embedding", "head")
"""The kinds of blocks."""
LAYER_KINDS = KINDS.index("embedding")
"""Kinds before this index are blocks of layers; full recomputation applies only to them."""
PASSES = ("forward", "backward")
RESOURCES = (
    "matmul",  # measured s of arithmetic of linear layers, in the job's precision
    "plain",  # measured s in BF16 or FP16: head, latent projections
    "router",  # measured s in BF16; many runs use FP32
    "expert",  # measured s of arithmetic of routed experts, in the job's precision
    "fill",  # the rest of the measured s of GEMMs: memory traffic and launches
    "attention",  # measured s of fused attention forward; backward the same times the ratio of FLOPs
    "unfused",  # s at the BF16 or FP16 peak: GEMMs of unfused attention
    "scan",  # measured s of a gated delta rule with the same FLOPs: Mamba's recurrence
    "delta",  # measured s of gated delta rules
    "misaligned",  # measured s of GEMMs with misaligned dimensions (16 bytes), per missing factor of 2
    "main_grads",  # s at HBM bandwidth: accumulation of weight gradients in FP32
    "stream",  # s at HBM bandwidth: norms, activations, residuals, rotary embedding
    "scores",  # s at HBM bandwidth: scores of unfused attention
    "loss",  # s at HBM bandwidth: logits
    "cast",  # s at HBM bandwidth: quantization
    "expert_cast",  # s at HBM bandwidth: quantization of the inputs of each expert
    "sorting",  # s at HBM bandwidth: permutation of tokens to experts and back
    "kernels",  # launches
    "expert_kernels",  # launches proportional to the number of local experts
    *(f"{group}_{part}" for group in ("tp", "cp", "ep") for part in ("near", "far", "steps", "hops")),
)
"""near and far: s at nominal bandwidth within and between NVLink domains; steps and hops: numbers of latencies."""
INDEX = {name: i for i, name in enumerate(RESOURCES)}


@dataclass(frozen=True)
class KernelUnits:
    """The fields of layouts that determine the work of a block, as arrays of the same length."""

    tp: Array
    cp: Array
    ep: Array
    etp: Array
    sp: Array
    mbs: Array
    modules: Column
    """Modules of selective recomputation, as bits of `layout.MODULES`; [units], or [V, 1] for V variants of each."""
    full: Flags
    """Whether recomputation is full; same shape."""


class Work:
    """Collector of the operations in a job's blocks.

    `passes` has shape [units, KINDS, PASSES, RESOURCES]. `repeated` is the part of the forward pass that is recomputed
    in the backward pass, and has shape [(V,) units, KINDS, RESOURCES].
    """

    def __init__(self, job: PlannedJob, units: KernelUnits) -> None:
        self.job, self.u, self.m = job, units, job.model
        gpu = job.node.gpu
        low = job.precision not in ("fp32", "tf32", "bf16", "fp16")
        self.low = low
        self.plain = "bf16" if low else job.precision
        """Precision of unquantized operations."""
        self.plain_peak = gpu.tflops(self.plain) * 1e12
        self.hbm = gpu.hbm_tb_per_s * 1e12
        self.size = 4 if job.precision in ("fp32", "tf32") else 2
        self.operand = kernel_times.element_bytes(job.precision)
        self.tokens = units.mbs * job.seq / units.cp
        self.outer = self.tokens / np.where(units.sp > 0, units.tp, 1)
        """Tokens per rank between tensor-parallel regions."""
        self.frozen = job.task == "lora"
        self.near = links_near(job)
        self.far = collectives.inter_domain_gb_per_s(job.node, job.fabric) * 1e9
        self.domain = max(1, job.node.nvlink_domain)
        self.passes = np.zeros((len(units.tp), len(KINDS), len(PASSES), len(RESOURCES)))
        repeated = np.broadcast_shapes(units.tp.shape, units.modules.shape)
        self.repeated = np.zeros((*repeated, len(KINDS), len(RESOURCES)))
        self.kind = 0

    def add(
        self, resource: str, forward: Number, backward: Number, module: str = "", recomputable: bool = True
    ) -> None:
        """Add seconds or launches to the current block; recomputation of the `MODULES` in `module` repeats them."""
        i = INDEX[resource]
        self.passes[:, self.kind, 0, i] += forward
        self.passes[:, self.kind, 1, i] += backward
        module_names = [name for name in module.split() if name]
        if recomputable and module_names:
            bits = sum(1 << MODULES.index(name) for name in module_names)
            self.repeated[..., self.kind, i] += np.where(self.u.modules & bits, forward, 0.0)

    def gemm(self, rows: Number, out: Number, inner: Number, module: str = "", *, plain: bool = False,
             resource: str = "", matrices: Number = 1, name: str = "",
             casts: tuple[bool, bool] = (True, True)) -> None:  # fmt: skip
        """Add a linear layer of `rows` tokens: forward, input gradient, and weight gradient unless weights are frozen.

        The rows are distributed over `matrices` experts, each with a matrix of `inner` x `out`. `casts`: whether
        kernels of their own quantize the input, and the gradient of the output.
        """
        low = self.low and not plain
        share = rows / matrices
        precision = self.job.precision if low else self.plain
        resource = resource or ("plain" if plain else "matmul")
        product = partial(self._product, precision, resource, matrices)
        wgrad = not self.frozen
        forward, other_forward = product(share, out, inner)
        backward, other_backward = product(share, inner, out)
        if wgrad:
            weights, other_weights = product(out, inner, share)
            backward, other_backward = backward + weights, other_backward + other_weights
        self.add(resource, forward, backward, module)
        self.add("fill", other_forward, other_backward, module)
        forward, backward = forward + other_forward, backward + other_backward
        off = np.maximum(_missing_factors(out, self.size), _missing_factors(inner, self.size))
        self.add("misaligned", forward * off, backward * off, module)
        self.add("main_grads", 0.0, wgrad * 6.0 * matrices * out * inner / self.hbm, module)  # 8 bytes, not 2
        if low:
            left, result = rows * inner, rows * out
            # Row-wise and column-wise copies; kernels that are not fused also read the input.
            written = 2 * self.operand
            cast = "expert_cast" if resource == "expert" else "cast"
            self.add(cast, casts[0] * left * written / self.hbm, casts[1] * result * written / self.hbm, module)
        self.add("kernels", 2.0 if low else 1.0, (2.0 + low) * (1 + wgrad) / 2, module)
        if self.frozen and name in self.job.options.lora_targets:
            self._adapter(rows, out, inner, module)

    def _product(self, precision: str, resource: str, groups: Number, m: Number, n: Number, k: Number
                 ) -> tuple[Array, Array]:  # fmt: skip
        """Return the seconds of a (grouped) GEMM: those of arithmetic, and those of memory traffic and the launch.

        No GEMM takes longer than on a weaker GPU, at the clock that the power of each sustains.
        """
        gpus = (self.job.node.gpu, *kernel_times.weaker(self.job.node.gpu, precision))
        arithmetic, other = kernel_times.gemm_parts(gpus, precision, m, n, k, groups)
        factors = np.array([calibration.power_factor(gpu, resource) for gpu in gpus])
        seconds = arithmetic * factors[:, None] + other
        share = seconds.min(axis=0) / seconds[0]
        return share * arithmetic[0], share * other[0]

    def _adapter(self, rows: Number, out: Number, inner: Number, module: str) -> None:
        """Add the two thin GEMMs of a LoRA adapter, which are memory-bound."""
        rank = self.job.options.lora_rank
        flops = 2.0 * rows * (out + inner) * rank / self.plain_peak
        passed = self.size * rows * (out + inner) / self.hbm
        self.add("plain", flops, 2 * flops, module)
        self.add("stream", 2 * passed, 3 * passed, module)
        self.add("kernels", 4.0, 8.0, module)

    def fused_attention(self, sequence: float, query: Number, out: Number, keys: Number, heads: Number) -> None:
        """Add causal attention over sequences of `sequence` tokens; widths as for `kernel_times.ideal_attention`."""
        gpu = self.job.node.gpu
        widths = float(np.max(query / heads))
        seconds = [
            kernel_times.ideal_attention(one, self.plain, self.tokens, sequence, query, out, keys)
            * kernel_times.attention(one, sequence, self.u.mbs * heads, widths)
            for one in (gpu, *kernel_times.weaker(gpu, self.plain))
        ]
        forward = np.min(seconds, axis=0)  # no attention takes longer than on a weaker GPU
        self.add("attention", forward, 2.5 * forward, "core_attn")  # 5 GEMMs instead of 2 (FlashAttention-2)

    def stream(
        self, forward: Number, backward: Number, kernels: float, module: str = "", resource: str = "stream"
    ) -> None:
        """Add memory-bound work: elements that `kernels` kernels read and write in each pass."""
        self.add(resource, forward * self.size / self.hbm, backward * self.size / self.hbm, module)
        self.add("kernels", kernels, kernels, module)

    def collective(self, group: str, operation: collectives.Operation, size: Number, ranks: Number, stride: Number,
                   times: tuple[float, float], module: str = "") -> None:  # fmt: skip
        """Add a collective of `ranks` GPUs whose ranks differ by `stride`; `times`: number in (forward, backward)."""
        near_ranks = np.clip(self.domain / stride, 1, ranks)
        v = collectives.volumes(operation, size, ranks, near_ranks)
        for part, amount in (
            ("near", v.near / self.near),
            ("far", v.far / self.far),
            ("steps", v.near_steps),
            ("hops", v.far_steps),
        ):
            self.add(f"{group}_{part}", amount * times[0], amount * times[1], module)

    def norm(self, before: str = "") -> None:
        """Add a norm over the hidden size; `before`: kind of the block that follows, if the norm can be recomputed."""
        h, module = self.m.hidden, "layernorm" if before and self.job.has_separate_norm(before) else ""
        self.stream(2 * self.outer * h, 4 * self.outer * h, 1, module)

    def residual(self) -> None:
        """Add the work of bias, dropout and residual connection, which Transformer Engine fuses into one kernel."""
        h, options = self.m.hidden, self.job.options
        if options.hidden_dropout:
            self.stream(3.5 * self.outer * h, 2.5 * self.outer * h, 1)
        else:
            self.stream(3 * self.outer * h, 1 * self.outer * h, 1)

    def parallel(self, module: str = "") -> None:
        """Add the tensor-parallel communication of a block: per pass an all-reduce, or with SP its two halves."""
        size = self.size * self.tokens * self.m.hidden
        if self.low:  # with sequence parallelism, Transformer Engine gathers quantized inputs
            size = size * np.where(self.u.sp > 0, (self.operand + self.size) / 2 / self.size, 1.0)
        self.collective("tp", "all_reduce", size, self.u.tp, 1.0, (1.0, 1.0), module)
        # With sequence parallelism, the input is gathered again for the weight gradient.
        regathered = np.where((self.u.sp > 0) & (self.u.tp > 1), 0.5, 0.0)
        if not self.frozen:
            v = collectives.volumes("all_reduce", size, self.u.tp, np.minimum(self.u.tp, self.domain))
            self.add("tp_near", 0, regathered * v.near / self.near)
            self.add("tp_far", 0, regathered * v.far / self.far)


def _missing_factors(side: Number, size: int) -> Number:
    """Return the number of factors of 2 that a GEMM dimension lacks for the 16-byte alignment of Tensor Cores.

    Source: NVIDIA, Matrix Multiplication Background User's Guide, section 3 (requirements to use tensor cores).
    """
    whole = 16 // size
    return np.log2(whole / np.gcd(np.asarray(side).astype(np.int64), whole))


def links_near(job: PlannedJob) -> float:
    """Return the nominal bandwidth between GPUs in one NVLink domain, in bytes/s."""
    return collectives.links(job.node, job.fabric).near_bytes_per_s
