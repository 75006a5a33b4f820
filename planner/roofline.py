"""What one block of a layer asks of a GPU: ideal seconds of each resource, forward, backward and recomputed.

`work(job, ...)` counts operations: matrix products at the peak of their precision, bytes at the HBM's bandwidth, bytes
on either tier of links, kernels. What the hardware reaches of it is calibration (`calibration.py`), one efficiency per
resource. A matrix product costs its FLOPs, its operands' bytes and a launch: so its efficiency falls with any small
dimension, the curve over size. Everything is an array over `Units`: the few distinct (tp, cp, ep, mbs, ...) of a table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from superpod.planner import collectives
from superpod.planner.job import Job
from superpod.planner.layout import MODULES
from superpod.planner.models import work as model_work

Array = NDArray[np.float64]

KINDS = ("attention", "mla", "mamba", "delta", "mlp", "moe", "embedding", "head")
"""Blocks that are costed; a rank holds so many of each."""
LAYER_KINDS = KINDS.index("embedding")
"""Kinds before this index are blocks of layers, which full recomputation takes."""
PHASES = ("forward", "backward", "again")
"""again = what is recomputed in the backward pass."""
RESOURCES = (
    "matmul",  # s at the peak of the job's precision: linear layers
    "plain",  # s at the BF16 or FP16 peak: head, router, unfused scores, latent projections
    "attention",  # s at the BF16 peak: fused attention
    "scan",  # s at the BF16 peak: Mamba and delta-net recurrences
    "expert",  # s at the peak of the job's precision: routed experts
    "waves",  # s at the peak: one round of tiles over all SMs for each product, of which the last is never full
    "operands",  # s at HBM bandwidth: operands of linear layers
    "stream",  # s at HBM bandwidth: norms, activations, residuals, rotary embedding
    "scores",  # s at HBM bandwidth: attention scores that are not fused
    "loss",  # s at HBM bandwidth: logits
    "cast",  # s at HBM bandwidth: quantisation
    "expert_cast",  # s at HBM bandwidth: quantisation of what experts work on, one by one
    "sorting",  # s at HBM bandwidth: permutation of tokens to experts and back
    "weights",  # s at HBM bandwidth: routed experts' operands
    "kernels",  # launches
    "expert_kernels",  # launches that grow with the number of local experts
    *(f"{group}_{part}" for group in ("tp", "cp", "ep") for part in ("near", "far", "steps")),
)
"""near and far: s at nominal bandwidth inside and between NVLink domains; steps: latencies."""
TILE = 128 * 128
"""Elements of a product that one SM works on at a time; cuBLAS's usual tiles are 128 x 128 to 128 x 256."""
INDEX = {name: i for i, name in enumerate(RESOURCES)}


@dataclass(frozen=True)
class Units:
    """The degrees that a block's work depends on, as arrays of one length."""

    tp: Array
    cp: Array
    ep: Array
    etp: Array
    sp: Array
    mbs: Array
    modules: NDArray[np.int64]
    """Bits of `layout.MODULES`, of selective recomputation."""
    full: NDArray[np.bool_]
    """Full recomputation."""


class Work:
    """Collects the work of one job's blocks: `table` has shape [units, KINDS, PHASES, RESOURCES]."""

    def __init__(self, job: Job, units: Units) -> None:
        self.job, self.u, self.m = job, units, job.model
        gpu = job.node.gpu
        low = job.precision not in ("fp32", "tf32", "bf16", "fp16")
        self.low = low
        self.peak = gpu.tflops(job.precision) * 1e12
        self.plain_peak = (gpu.tflops(job.precision) if not low else gpu.bf16_tflops) * 1e12
        self.hbm = gpu.hbm_tb_per_s * 1e12
        self.size = 4 if job.precision in ("fp32", "tf32") else 2
        self.operand = {"nvfp4": 0.5625, "mxfp8": 1.03}.get(job.precision, 1.0) if low else self.size
        self.tokens = units.mbs * job.seq / units.cp
        self.outer = self.tokens / np.where(units.sp > 0, units.tp, 1)
        """Tokens that a rank keeps between tensor-parallel regions."""
        self.frozen = job.task == "lora"
        self.near = links_near(job)
        self.far = collectives.outside(job.node, job.fabric) * 1e9
        self.domain = max(1, job.node.nvlink_domain)
        self.table = np.zeros((len(units.tp), len(KINDS), len(PHASES), len(RESOURCES)))
        self.kind = 0

    def add(self, resource: str, forward: Any, backward: Any, module: str = "", again: bool = True) -> None:
        """Count seconds or launches of the block at hand; `module` says what selective recomputation may take."""
        i = INDEX[resource]
        self.table[:, self.kind, 0, i] += forward
        self.table[:, self.kind, 1, i] += backward
        taken = [name for name in module.split() if name]
        if again and taken:
            bits = sum(1 << MODULES.index(name) for name in taken)
            self.table[:, self.kind, 2, i] += np.where(self.u.modules & bits, forward, 0.0)

    def gemm(self, rows: Any, out: Any, inner: Any, module: str = "", *, plain: bool = False, trained: bool = True,
             expert: bool = False, matrices: Any = 1, name: str = "") -> None:  # fmt: skip
        """A linear layer of `rows` tokens: forward, gradients of its input, and of its weights if it is trained."""
        low = self.low and not plain
        each = self.operand if low else self.size
        peak = self.peak if low or not self.low else self.plain_peak
        flops = 2.0 * rows * out * inner / peak
        wgrad = trained and not self.frozen
        left, right, result = rows * inner, matrices * out * inner, rows * out
        forward = each * (left + right) + self.size * result
        backward = each * (result + right) + self.size * left
        backward = backward + wgrad * (each * (left + result) + 8 * right)  # adds to FP32 main gradients
        self.add("expert" if expert else "plain" if plain else "matmul", flops, flops * (1 + wgrad), module)
        self.add("weights" if expert else "operands", forward / self.hbm, backward / self.hbm, module)
        wave = 2.0 * TILE * self.job.node.gpu.sms / peak
        self.add("waves", wave * inner, wave * (out + wgrad * rows / matrices), module)
        if low:
            read = 2 * self.size + 2 * each  # amax or block scales, then the copies by rows and by columns
            cast = "expert_cast" if expert else "cast"
            self.add(cast, left * read / self.hbm, result * read / self.hbm, module)
        self.add("kernels", 2.0 if low else 1.0, (2.0 + low) * (1 + wgrad) / 2, module)
        if self.frozen and name in self.job.options.lora_targets:
            self._adapter(rows, out, inner, module)

    def _adapter(self, rows: Any, out: Any, inner: Any, module: str) -> None:
        """LoRA's two thin products beside a frozen matrix: bytes rather than FLOPs."""
        rank = self.job.options.lora_rank
        flops = 2.0 * rows * (out + inner) * rank / self.plain_peak
        passed = self.size * rows * (out + inner) / self.hbm
        self.add("plain", flops, 2 * flops, module)
        self.add("stream", 2 * passed, 3 * passed, module)
        self.add("kernels", 4.0, 8.0, module)

    def stream(self, forward: Any, backward: Any, kernels: float, module: str = "", resource: str = "stream") -> None:
        """Elements that pass the memory in `kernels` kernels; the backward pass launches as many."""
        self.add(resource, forward * self.size / self.hbm, backward * self.size / self.hbm, module)
        self.add("kernels", kernels, kernels, module)

    def collective(self, group: str, operation: Any, size: Any, ranks: Any, stride: Any, times: tuple[float, float],
                   module: str = "") -> None:  # fmt: skip
        """A collective of `ranks` GPUs, `stride` apart, `times` = how often forward and backward."""
        near_ranks = np.clip(self.domain / stride, 1, ranks)
        v = collectives.volumes(operation, size, ranks, near_ranks)
        for part, amount in (
            ("near", v.near / self.near),
            ("far", v.far / self.far),
            ("steps", v.near_steps + v.far_steps),
        ):
            self.add(f"{group}_{part}", amount * times[0], amount * times[1], module)

    def norm(self, module: str = "layernorm") -> None:
        """A norm over the hidden size; backward reads input and gradient, and writes one."""
        h = self.m.hidden
        self.stream(2 * self.outer * h, 4 * self.outer * h, 1, module)

    def residual(self) -> None:
        """Bias, dropout and addition to the residual stream, fused with Transformer Engine."""
        h, options = self.m.hidden, self.job.options
        if options.hidden_dropout:
            self.stream(3.5 * self.outer * h, 2.5 * self.outer * h, 1)
        else:
            self.stream(3 * self.outer * h, 1 * self.outer * h, 1)

    def parallel(self, module: str = "") -> None:
        """What tensor parallelism exchanges for one block: an all-reduce each way, or its two halves."""
        size = self.size * self.tokens * self.m.hidden
        if self.low:  # with sequence parallelism inputs are gathered as they were quantised: Transformer Engine
            size = size * np.where(self.u.sp > 0, (self.operand + self.size) / 2 / self.size, 1.0)
        self.collective("tp", "all_reduce", size, self.u.tp, 1.0, (1.0, 1.0), module)
        again = np.where((self.u.sp > 0) & (self.u.tp > 1), 0.5, 0.0)  # the input is gathered again for its weights
        if not self.frozen:
            v = collectives.volumes("all_reduce", size, self.u.tp, np.minimum(self.u.tp, self.domain))
            self.add("tp_near", 0, again * v.near / self.near)
            self.add("tp_far", 0, again * v.far / self.far)

    def block(self, kind: str) -> None:
        """Count one block of a kind."""
        self.kind = KINDS.index(kind)
        BLOCKS[kind](self)


def links_near(job: Job) -> float:
    """Nominal bytes/s between GPUs of one NVLink domain."""
    return collectives.links(job.node, job.fabric).near_bytes_per_s


def attention(w: Work) -> None:
    """Norm, queries/keys/values, rotary embedding, attention, projection."""
    m, tp, t = w.m, w.u.tp, w.tokens
    q, kv = m.heads * m.channels / tp, m.groups * m.channels / np.minimum(tp, m.groups)
    w.norm()
    w.gemm(t, q * (1 + m.attention_gate) + 2 * kv, m.hidden, name="linear_qkv")
    if not m.positions:
        w.stream(2 * t * (q + kv), 2 * t * (q + kv), 2)
    if m.qk_norm:
        w.stream(2 * t * (q + kv), 4 * t * (q + kv), 2)
    _core(w, q, q, 2 * kv, m.heads / tp)
    if m.attention_gate:
        w.stream(3 * t * q, 5 * t * q, 1)
    w.gemm(t, m.hidden, q, name="linear_proj")
    w.parallel()
    w.residual()
    if m.post_norms:
        w.norm("")


def mla(w: Work) -> None:
    """Multi-head latent attention: down- and up-projections, a shared rotary key, wide queries and keys."""
    m, tp, t = w.m, w.u.tp, w.tokens
    qk = m.qk_nope_dim + m.qk_rope_dim
    heads = m.heads / tp
    w.norm()
    if m.q_lora:
        w.gemm(w.outer, m.q_lora + m.kv_lora + m.qk_rope_dim, m.hidden)
        w.gemm(t, heads * qk, m.q_lora, "mla_up_proj")
        w.stream(2 * t * m.q_lora, 4 * t * m.q_lora, 1, "mla_up_proj")
    else:
        w.gemm(w.outer, m.kv_lora + m.qk_rope_dim, m.hidden)
        w.gemm(t, heads * qk, m.hidden)
    w.gemm(t, heads * (m.qk_nope_dim + m.v_dim), m.kv_lora, "mla_up_proj")
    w.stream(2 * t * m.kv_lora, 4 * t * m.kv_lora, 1, "mla_up_proj")
    w.stream(3 * t * heads * qk, 3 * t * heads * qk, 5, "mla_up_proj")  # rotary parts split off and joined
    if m.indexer_heads:
        w.gemm(t, m.indexer_heads * m.indexer_dim, m.q_lora, plain=True)
        w.gemm(t, m.indexer_dim + m.indexer_heads, m.hidden, plain=True)
    _core(w, heads * qk, heads * m.v_dim, heads * (qk + m.v_dim), heads)
    w.gemm(t, m.hidden, heads * m.v_dim, name="linear_proj")
    w.parallel()
    w.residual()


def _core(w: Work, query: Any, out: Any, keys: Any, heads: Any) -> None:
    """Scores, softmax and their product with the values; context parallelism passes the keys around."""
    m, t, job = w.m, w.tokens, w.job
    spans = [model_work.span(m, job.seq, i, True) for i, b in enumerate(m.blocks) if b[0] in ("attention", "mla")]
    seen = float(np.mean(spans)) if spans else job.seq / 2.0
    if job.options.attention in ("unfused", "local"):
        flops = 2.0 * t * job.seq * (query + out) / w.plain_peak
        w.add("plain", flops, 2 * flops, "core_attn")
        passes = 8.0 if job.options.attention_dropout else 6.0  # product, scale and mask, softmax, dropout, product
        w.stream(passes * t * job.seq * heads, passes * t * job.seq * heads, 6, "core_attn", "scores")
        if job.options.impl == "local":  # Megatron's fused softmax wants 4 heads x samples (fused_softmax.py)
            odd = (heads * w.u.mbs % 4 != 0) * 1.0
            w.stream(odd * 6 * t * job.seq * heads, odd * 4 * t * job.seq * heads, 0, "core_attn", "scores")
            w.add("kernels", odd * 5, odd * 4, "core_attn")
    else:
        flops = 2.0 * t * seen * (query + out) / w.plain_peak
        w.add("attention", flops, 2.5 * flops, "core_attn")
        w.add("operands", w.size * t * (query + out + keys) / w.hbm, 2 * w.size * t * (query + out + keys) / w.hbm)
        w.add("kernels", 1.0, 2.0, "core_attn")
        if m.indexer_heads:
            w.add("plain", 2.0 * t * job.seq / 2 * m.indexer_heads * m.indexer_dim / w.plain_peak, 0.0)
    steps = w.u.cp
    if job.options.cp_comm == "a2a":
        w.collective("cp", "all_to_all", w.size * t * (query + out + keys), steps, w.u.tp, (1.0, 1.0), "core_attn")
    else:  # each rank's keys and values go round; backward their gradients as well
        w.collective("cp", "all_gather", w.size * t * keys * steps, steps, w.u.tp, (1.0, 2.0), "core_attn")
        w.add("cp_steps", steps - 1, 2 * (steps - 1), "core_attn")  # a ring, and partial results joined at each step
        joined = 3.0 * (steps - 1) * w.size * t * out / w.hbm
        w.add("stream", joined, joined, "core_attn")
    w.add("kernels", 6.0 * (steps - 1), 8.0 * (steps - 1), "core_attn")


def mlp(w: Work) -> None:
    """The dense MLP."""
    m, ffn = w.m, w.m.ffn / w.u.tp
    w.norm()
    _feed_forward(w, w.tokens, ffn, "mlp")
    w.parallel("mlp")
    w.residual()
    if m.post_norms:
        w.norm("")


def _feed_forward(w: Work, tokens: Any, ffn: Any, module: str) -> None:
    m = w.m
    up = 2 * ffn if m.gated else ffn
    w.gemm(tokens, up, m.hidden, module, name="linear_fc1")
    passes = (3.0, 5.0) if m.gated else (2.0, 3.0)
    w.stream(passes[0] * tokens * ffn, passes[1] * tokens * ffn, 1, module)
    w.gemm(tokens, m.hidden, ffn, module, name="linear_fc2")


def moe(w: Work) -> None:
    """Router, tokens sent to their experts, grouped products, tokens sent back; the shared expert beside it."""
    m, u, t, options = w.m, w.u, w.tokens, w.job.options
    width = m.latent or m.hidden
    local = m.experts / u.ep
    sent = w.outer if options.capacity is None else w.outer * options.capacity
    routed = t / u.tp * m.topk * u.etp  # tokens that an expert rank works on, while experts are balanced
    routed = routed * options.imbalance
    w.norm()
    w.gemm(w.outer, m.experts, m.hidden, "moe", plain=True, trained=False)
    w.stream(8.0 * w.outer * m.experts, 6.0 * w.outer * m.experts, 8, "moe")
    if m.latent:
        w.gemm(w.outer, m.latent, m.hidden, "moe", plain=True)
        w.gemm(w.outer, m.hidden, m.latent, "moe", plain=True)
    _dispatch(w, sent, width)
    w.stream(4.0 * routed * width, 4.0 * routed * width, 6, "moe", "sorting")
    up, ffn = (2 if m.gated else 1) * m.expert_ffn / u.etp, m.expert_ffn / u.etp
    w.gemm(routed, up, width, "moe", expert=True, matrices=local)
    passes = (3.0, 5.0) if m.gated else (2.0, 3.0)
    w.stream(passes[0] * routed * ffn, passes[1] * routed * ffn, 1, "moe moe_act")
    w.gemm(routed, width, ffn, "moe", expert=True, matrices=local)
    if m.bias:  # added to each expert's rows, and summed over them backward
        w.stream(2.0 * routed * (up + width), 2.0 * routed * (up + width), 2, "moe")
    w.add("expert_kernels", 2.0 * local, 4.0 * local, "moe")
    if m.shared_ffn:
        _feed_forward(w, t, m.shared_ffn / u.tp, "shared_experts moe")
        w.parallel("shared_experts moe")
    w.residual()


def _dispatch(w: Work, tokens: Any, width: int) -> None:
    """Tokens to the experts' ranks and back. A token goes once to each domain that holds an expert of its."""
    u, topk = w.u, w.m.topk
    group = u.ep * u.etp
    inside = np.clip(w.domain, 1, group)
    domains = group / inside
    size = w.size * tokens * width * topk
    copies = domains * (1 - (1 - 1 / domains) ** topk) / topk  # distinct domains among topk experts
    v = collectives.volumes("all_to_all", size, group, inside)
    far = v.far * np.where(domains > 1, copies, 1.0)
    for part, amount in (("near", v.near / w.near), ("far", far / w.far), ("steps", v.near_steps + v.far_steps)):
        w.add(f"ep_{part}", 2 * amount, 2 * amount, "moe")


def mamba(w: Work) -> None:
    """Mamba-2 mixer: one projection in, convolution, scan in chunks, gated norm, projection out."""
    m, tp, t = w.m, w.u.tp, w.tokens
    inner, states = m.mamba_heads * m.mamba_head_dim / tp, 2 * m.mamba_groups * m.mamba_state / tp
    w.norm()
    w.gemm(t, 2 * inner + states + m.mamba_heads / tp, m.hidden)
    w.stream(2 * t * (inner + states), 4 * t * (inner + states), 2)
    _scan(w, inner * (2 * m.mamba_state + 128) * 2.0, 4 * inner + 2 * states)
    w.stream(3 * t * inner, 6 * t * inner, 2)
    w.gemm(t, m.hidden, inner)
    w.parallel()
    w.residual()


def delta(w: Work) -> None:
    """Gated delta net."""
    m, tp, t = w.m, w.u.tp, w.tokens
    keys, values = m.delta_key_heads * m.delta_key_dim / tp, m.delta_value_heads * m.delta_value_dim / tp
    w.norm()
    w.gemm(t, 2 * keys + 2 * values + 2 * m.delta_value_heads / tp, m.hidden)
    w.stream(2 * t * (2 * keys + values), 4 * t * (2 * keys + values), 4)
    _scan(w, 6.0 * values * m.delta_key_dim, 4 * values + 4 * keys)
    w.stream(3 * t * values, 6 * t * values, 3)
    w.gemm(t, m.hidden, values)
    w.parallel()
    w.residual()


def _scan(w: Work, flops: Any, passes: Any) -> None:
    w.add("scan", w.tokens * flops / w.plain_peak, 2.5 * w.tokens * flops / w.plain_peak)
    w.stream(w.tokens * passes, 2.5 * w.tokens * passes, 5)


def embedding(w: Work) -> None:
    """A look-up, and the gradients added to its rows."""
    h = w.m.hidden
    w.stream(3 * w.outer * h, 4 * w.outer * h, 3)
    w.collective("tp", "all_reduce", w.size * w.tokens * h, w.u.tp, 1.0, (1.0, 1.0))


def head(w: Work) -> None:
    """Final norm, output matrix, loss over the vocabulary (FP32 in part)."""
    m, t = w.m, w.tokens
    columns = m.vocab / w.u.tp
    w.norm("")
    w.gemm(t, columns, m.hidden, plain=True)
    passes = (2.5, 2.5) if w.job.options.fused_loss else (20.0, 10.0)  # cast, maximum, difference, exponent, sum: FP32
    w.stream(passes[0] * t * columns, passes[1] * t * columns, 6, "", "loss")
    w.collective("tp", "all_reduce", w.size * t * m.hidden, w.u.tp, 1.0, (0.5, 0.5))


BLOCKS: dict[str, Callable[[Work], None]] = {
    "attention": attention,
    "mla": mla,
    "mamba": mamba,
    "delta": delta,
    "mlp": mlp,
    "moe": moe,
    "embedding": embedding,
    "head": head,
}


def work(job: Job, units: Units) -> Array:
    """Work of one block of each kind that the model has: [units, KINDS, PHASES, RESOURCES], for one micro-batch.

    Seconds at nominal peaks and bandwidths; launches and latencies are counts.
    """
    found = Work(job, units)
    for kind in (*sorted(job.model.kinds), "embedding", "head"):
        found.block(kind)
    layers = found.table[:, :LAYER_KINDS]
    layers[units.full, :, 2] = layers[units.full, :, 0]
    return found.table
