"""Count the operations of each kind of block: every function adds the work of one block to a `roofline.Work`.

FLOPs and bytes account for what Megatron-Core and Transformer Engine fuse. Numbers that are not plain arithmetic have a
source. `w.stream(a, b, n)` means that n kernels move a elements forward and b backward.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from superpod.planner.arrays import Array, Number
from superpod.planner.calibration import calibration
from superpod.planner.models import work as model_work
from superpod.planner.planned_job import PlannedJob
from superpod.planner.timing import kernel_times
from superpod.planner.timing.roofline import KINDS, LAYER_KINDS, KernelUnits, Work


def attention(w: Work) -> None:
    """Add the work of an attention block: norm, queries/keys/values, rotary embedding, attention, projection."""
    m, tp, t = w.m, w.u.tp, w.tokens
    q, kv = m.heads * m.channels / tp, m.groups * m.channels / np.minimum(tp, m.groups)
    w.norm("attention")
    w.gemm(t, q * (1 + m.attention_gate) + 2 * kv, m.hidden, name="linear_qkv")
    if not m.positions:  # rotary embedding: read and write queries and keys
        w.stream(2 * t * (q + kv), 2 * t * (q + kv), 2)
    if m.qk_norm:
        w.stream(2 * t * (q + kv), 4 * t * (q + kv), 2)
    _core(w, q, q, 2 * kv, m.heads / tp)
    if m.attention_gate:  # sigmoid of the gate times the output: two inputs, one result
        w.stream(3 * t * q, 5 * t * q, 1)
    w.gemm(t, m.hidden, q, name="linear_proj")
    w.parallel()
    w.residual()
    if m.post_norms:  # Gemma 2 and 3
        w.norm()


def mla(w: Work) -> None:
    """Add the work of a multi-latent attention block: down- and up-projections, shared rotary key, core attention."""
    m, tp, t = w.m, w.u.tp, w.tokens
    qk = m.qk_nope_dim + m.qk_rope_dim
    heads = m.heads / tp
    w.norm("mla")
    if m.q_lora:  # one GEMM for both down-projections: they share their input
        w.gemm(w.outer, m.q_lora + m.kv_lora + m.qk_rope_dim, m.hidden, name="linear_kv_down_proj")
        w.gemm(t, heads * qk, m.q_lora, "mla_up_proj", name="linear_q_up_proj")
        w.stream(2 * t * m.q_lora, 4 * t * m.q_lora, 1, "mla_up_proj")
    else:
        w.gemm(w.outer, m.kv_lora + m.qk_rope_dim, m.hidden, name="linear_kv_down_proj")
        w.gemm(t, heads * qk, m.hidden, name="linear_q_proj")
    w.gemm(t, heads * (m.qk_nope_dim + m.v_dim), m.kv_lora, "mla_up_proj", name="linear_kv_up_proj")
    w.stream(2 * t * m.kv_lora, 4 * t * m.kv_lora, 1, "mla_up_proj")
    w.stream(3 * t * heads * qk, 3 * t * heads * qk, 5, "mla_up_proj")  # split and concatenate the rotary parts
    if m.indexer_heads:  # sparse attention scores all keys with a few small heads first (DeepSeek V3.2)
        w.gemm(t, m.indexer_heads * m.indexer_dim, m.q_lora, plain=True)
        w.gemm(t, m.indexer_dim + m.indexer_heads, m.hidden, plain=True)
    _core(w, heads * qk, heads * m.v_dim, heads * (qk + m.v_dim), heads)
    w.gemm(t, m.hidden, heads * m.v_dim, name="linear_proj")
    w.parallel()
    w.residual()


def _core(w: Work, query: Number, out: Number, keys: Number, heads: Number) -> None:
    """Add core attention (scores, softmax, GEMM with the values) and the communication of context parallelism.

    `query`, `out` and `keys` are widths in elements per token of queries, output, and keys and values together;
    `heads` is the number of heads on a rank.
    """
    m, t, job = w.m, w.tokens, w.job
    spans = [model_work.span(m, job.seq, i, True) for i, b in enumerate(m.blocks) if b[0] in ("attention", "mla")]
    keys_per_token = float(np.mean(spans)) if spans else job.seq / 2.0
    if job.keeps_scores:
        flops = 2.0 * t * job.seq * (query + out) / w.plain_peak  # all scores, including the masked half
        w.add("unfused", flops, 2 * flops, "core_attn")
        passes = 8.0 if job.options.attention_dropout else 6.0  # product, scale and mask, softmax, dropout, product
        w.stream(passes * t * job.seq * heads, passes * t * job.seq * heads, 6, "core_attn", "scores")
        if m.soft_capped:  # division, tanh, product, one kernel each, as in logit_softcapping of NeMo 2.7.3
            w.stream(6 * t * job.seq * heads, 7 * t * job.seq * heads, 3, "core_attn", "scores")
        if job.options.impl == "local":  # Megatron's fused softmax needs a multiple of 4 heads (fused_softmax.py)
            odd = (heads * w.u.mbs % 4 != 0) * 1.0
            w.stream(odd * 6 * t * job.seq * heads, odd * 4 * t * job.seq * heads, 0, "core_attn", "scores")
            w.add("kernels", odd * 5, odd * 4, "core_attn")
    else:
        w.fused_attention(2.0 * keys_per_token, query, out, keys, heads)
        w.add("kernels", 1.0, 2.0, "core_attn")
        if m.indexer_heads:
            w.add("unfused", 2.0 * t * job.seq / 2 * m.indexer_heads * m.indexer_dim / w.plain_peak, 0.0)
    steps = w.u.cp
    if job.options.cp_comm == "a2a":
        w.collective("cp", "all_to_all", w.size * t * (query + out + keys), steps, w.u.tp, (1.0, 1.0), "core_attn")
    else:  # a ring exchanges keys and values, and in the backward pass also their gradients
        w.collective("cp", "all_gather", w.size * t * keys * steps, steps, w.u.tp, (1.0, 2.0), "core_attn")
        w.add("cp_steps", steps - 1, 2 * (steps - 1), "core_attn")  # each step of the ring merges partial results
        joined = 3.0 * (steps - 1) * w.size * t * out / w.hbm
        w.add("stream", joined, joined, "core_attn")
    w.add("kernels", 6.0 * (steps - 1), 8.0 * (steps - 1), "core_attn")  # per step of the ring


def mlp(w: Work) -> None:
    """Add the work of a dense MLP and its norm."""
    m, ffn = w.m, w.m.ffn / w.u.tp
    w.norm("mlp")
    _feed_forward(w, w.tokens, ffn, "mlp")
    w.parallel("mlp")
    w.residual()
    if m.post_norms:
        w.norm()


def _feed_forward(w: Work, tokens: Number, ffn: Number, module: str) -> None:
    """Add both linear layers of an MLP of width `ffn`, and its activation; `module` as for `Work.add`."""
    m = w.m
    up = 2 * ffn if m.gated else ffn  # SwiGLU: gate and up projection in one matrix
    w.gemm(tokens, up, m.hidden, module, name="linear_fc1")
    passes = (3.0, 5.0) if m.gated else (2.0, 3.0)
    w.stream(passes[0] * tokens * ffn, passes[1] * tokens * ffn, 1, module)
    w.gemm(tokens, m.hidden, ffn, module, name="linear_fc2")


def moe(w: Work) -> None:
    """Add the work of an MoE layer: router, dispatch of tokens, grouped GEMMs, return of tokens, shared experts."""
    m, u, t, options = w.m, w.u, w.tokens, w.job.options
    width = m.latent or m.hidden
    local = m.experts / u.ep
    sent = w.outer if options.capacity is None else w.outer * options.capacity
    routed = t / u.tp * m.topk * u.etp  # rows per expert rank, if experts are balanced
    routed = routed * options.imbalance
    w.norm("moe")
    w.gemm(w.outer, m.experts, m.hidden, "moe", plain=True, resource="router")
    w.stream(8.0 * w.outer * m.experts, 6.0 * w.outer * m.experts, 8, "moe")
    if m.latent:
        w.gemm(w.outer, m.latent, m.hidden, "moe", plain=True)
        w.gemm(w.outer, m.hidden, m.latent, "moe", plain=True)
    _dispatch(w, sent, width)
    # Rows are sorted by expert before the grouped GEMMs, and restored to their order after them.
    w.stream(2.0 * routed * width, 2.0 * routed * width, 6, "moe", "sorting")
    up, ffn = (2 if m.gated else 1) * m.expert_ffn / u.etp, m.expert_ffn / u.etp
    # The kernel of fused experts applies the activation and quantizes its result, and likewise in the backward pass
    # (NVIDIA/TransformerEngine pull 2769): neither the hidden activation nor its gradient is read again.
    fused = calibration.fuses_experts(w.job)
    w.gemm(routed, up, width, "moe", resource="expert", matrices=local, casts=(True, not fused))
    if not fused:
        passes = (3.0, 5.0) if m.gated else (2.0, 3.0)
        w.stream(passes[0] * routed * ffn, passes[1] * routed * ffn, 1, "moe moe_act")
        if m.clamped:  # both halves are clamped and concatenated (weighted_bias_quick_geglu_impl)
            w.stream(8.0 * routed * ffn, 10.0 * routed * ffn, 3, "moe moe_act")
    w.gemm(routed, width, ffn, "moe", resource="expert", matrices=local, casts=(not fused, True))
    w.add("expert_kernels", 2.0 * local, 4.0 * local, "moe")
    if m.bias:
        _expert_biases(w, routed * up, routed * width, local)
    if m.shared_ffn:
        _feed_forward(w, t, m.shared_ffn / u.tp, "shared_experts moe")
        w.parallel("shared_experts moe")
    w.residual()


def _expert_biases(w: Work, up: Number, down: Number, experts: Number) -> None:
    """Add the biases of routed experts; `up` and `down`: elements of the outputs of the first and second GEMM.

    The first is added by the GEMM, and summed over the rows in the backward pass. The second is weighted by the
    router's probabilities, per expert in FP32 (TEGroupedMLP._apply_bias): the products are written, added, concatenated
    and rounded; in the backward pass, they are also summed twice.
    """
    w.stream(14.0 * down, up + 20.0 * down, 4, "moe")
    w.add("expert_kernels", 2.0 * experts, 7.0 * experts, "moe")


def _dispatch(w: Work, tokens: Number, width: int) -> None:
    """Add the dispatch of tokens to the ranks of their experts, and the combine.

    All-to-all sends a token to each of its experts. DeepEP and HybridEP send it once to each NVLink domain with some of
    its experts, and from there once to each rank. Ranks that share experts (ETP) all-gather the received tokens.
    """
    u, topk = w.u, w.m.topk
    inside = np.clip(w.domain / u.etp, 1, u.ep)
    domains, token = u.ep / inside, w.size * tokens * width
    if w.job.options.deepep:
        near = _expected_destinations(u.ep, topk) * (inside - 1) / inside
        far = _expected_destinations(domains, topk) * (domains - 1) / domains
    else:
        near, far = topk * (inside - 1) / u.ep, topk * (u.ep - inside) / u.ep
    near = near + topk * (u.etp - 1)
    steps = (inside > 1) * 1.0 + (domains > 1) + (u.etp > 1)
    for part, amount in (("near", token * near / w.near), ("far", token * far / w.far), ("steps", steps)):
        w.add(f"ep_{part}", 2 * amount, 2 * amount, "moe")


def _expected_destinations(ranks: Array, topk: int) -> Array:
    """Return the expected number of ranks (or domains) that have at least one of a token's topk experts."""
    return ranks * (1 - (1 - 1 / ranks) ** topk)


def mamba(w: Work) -> None:
    """Add the work of a Mamba-2 mixer: input projection, convolution, chunked scan, gated norm, output projection."""
    m, tp, t = w.m, w.u.tp, w.tokens
    inner, states = m.mamba_heads * m.mamba_head_dim / tp, 2 * m.mamba_groups * m.mamba_state / tp
    w.norm("mamba")
    w.gemm(t, 2 * inner + states + m.mamba_heads / tp, m.hidden)
    w.stream(2 * t * (inner + states), 4 * t * (inner + states), 2)
    # A scan in chunks of 128 tokens (MambaMixer, chunk_size): GEMMs within a chunk, states between chunks.
    flops, passes = inner * (2 * m.mamba_state + 128) * 2.0, 4 * inner + 2 * states
    scan = kernel_times.chunked_scan(w.job.node.gpu, t * flops)
    w.add("scan", scan, 2.5 * scan)
    w.stream(t * passes, 2.5 * t * passes, 5)
    w.stream(3 * t * inner, 6 * t * inner, 2)
    w.gemm(t, m.hidden, inner)
    w.parallel()
    w.residual()


def delta(w: Work) -> None:
    """Add the work of a gated delta net: like Mamba, with separate widths of keys and values."""
    m, tp, t = w.m, w.u.tp, w.tokens
    keys, values = m.delta_key_heads * m.delta_key_dim / tp, m.delta_value_heads * m.delta_value_dim / tp
    w.norm("delta")
    w.gemm(t, 2 * keys + 2 * values + 2 * m.delta_value_heads / tp, m.hidden)
    w.stream(2 * t * (2 * keys + values), 4 * t * (2 * keys + values), 4)
    rule = kernel_times.chunked_scan(w.job.node.gpu, 6.0 * t * values * m.delta_key_dim)
    w.add("delta", rule, 2.5 * rule)
    w.stream(t * (4 * values + 4 * keys), 2.5 * t * (4 * values + 4 * keys), 5)
    w.stream(3 * t * values, 6 * t * values, 3)
    w.gemm(t, m.hidden, values)
    w.parallel()
    w.residual()


def embedding(w: Work) -> None:
    """Add the work of the embedding: a lookup, and in the backward pass the accumulation of gradients in its rows."""
    h = w.m.hidden
    w.stream(3 * w.outer * h, 4 * w.outer * h, 3)
    w.collective("tp", "all_reduce", w.size * w.tokens * h, w.u.tp, 1.0, (1.0, 1.0))


def head(w: Work) -> None:
    """Add the work of the head: final norm, output layer, loss over the vocabulary (partly in FP32)."""
    m, t = w.m, w.tokens
    columns = m.padded_vocab(w.u.tp.astype(np.int64)) / w.u.tp
    w.norm()
    w.gemm(t, columns, m.hidden, plain=True)
    # Unfused: cast, maximum, difference, exponent, sum, in FP32. Fused: read once, and replaced by the gradient.
    passes = (1.0, 1.0) if w.job.options.fused_loss else (8.0, 4.0)
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


def work(job: PlannedJob, units: KernelUnits) -> tuple[Array, Array]:
    """Return the work of one block of each kind in the model per micro-batch, `Work.passes` and `Work.repeated`.

    The values are seconds at nominal peaks and bandwidths; launches and latencies are counts.
    """
    block_work = Work(job, units)
    for kind in (*sorted(job.model.kinds), "embedding", "head"):
        block_work.kind = KINDS.index(kind)
        BLOCKS[kind](block_work)
    layers, forward = block_work.repeated[..., :LAYER_KINDS, :], block_work.passes[:, :LAYER_KINDS, 0]
    np.copyto(layers, forward, where=units.full[..., None, None])
    return block_work.passes, block_work.repeated
