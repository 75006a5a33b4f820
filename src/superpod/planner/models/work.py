"""Model FLOPs per token.

Only GEMMs are counted, once forward and twice backward (factor 3), with two FLOPs per multiply-add; not norms,
activations, rotary embeddings or recomputation. The embedding is a lookup; the output layer is a GEMM with the unpadded
vocabulary.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from superpod.errors import UserError
from superpod.planner.models import counts

if TYPE_CHECKING:
    from superpod.planner.models.shape import ModelShape


def flops_per_token(m: ModelShape, seq: int, *, causal: bool) -> float:
    """Return the model FLOPs per token of a training step.

    Args:
        m: the model.
        seq: sequence length in tokens.
        causal: whether to count only the half of the attention scores that a causal mask keeps. Published figures
            differ: NeMo 24.07 to 25.07 and Megatron-LM count all scores (Llama 3 8B at 8192: 57.9 GFLOP),
            Megatron-Bridge half (51.5).
    """
    if type(seq) is not int or seq < 1:
        raise UserError(f"seq must be at least 1, not {seq!r}")
    blocks = Counter(m.count_blocks(range(m.layers))) + Counter(list(m.mtp_blocks) * m.mtp_layers)
    gemm_parameters = sum(product_parameters(m, kind) * count for kind, count in blocks.items())
    gemm_parameters += m.vocab * m.hidden * (1 + m.mtp_layers) + 2 * m.hidden * m.hidden * m.mtp_layers
    return 6.0 * gemm_parameters + 3 * (attention_flops(m, seq, causal) + scan_flops(m))


def product_parameters(m: ModelShape, block: str) -> int:
    """Return the number of parameters of a block that a token uses in GEMMs: of the routed experts, only topk."""
    model = m.replace(bias=False, qkv_bias=False, sink=False)
    p = counts.block_parameters(model, block)
    routed_parameters = p.experts * m.topk // m.experts if p.experts else 0
    return p.dense - p.norms - counts.elementwise(m, block) + routed_parameters


def attention_flops(m: ModelShape, seq: int, causal: bool) -> float:
    """Return the forward FLOPs per token of attention scores and their GEMM with the values, over all layers."""
    if m.kv_lora:
        width, indexer = m.heads * (m.qk_nope_dim + m.qk_rope_dim + m.v_dim), m.indexer_heads * m.indexer_dim
    else:
        width, indexer = 2 * m.heads * m.channels, 0
    spans = [span(m, seq, i, causal) for i, blocks in enumerate(m.blocks) if blocks[0] in ("attention", "mla")]
    spans += [span(m, seq, m.layers - 1, causal)] * (m.mtp_layers * (m.mtp_blocks[0] in ("attention", "mla")))
    full_span = (seq / 2 if causal else seq) * len(spans)
    return 2 * width * sum(spans) + 2 * indexer * full_span


def span(m: ModelShape, seq: int, layer: int, causal: bool) -> float:
    """Return the mean number of keys that a token attends to in a layer; if not `causal`, masked keys are counted."""
    window = seq if m.sees_all(layer) else min(seq, m.window)
    window = min(window, m.indexer_topk) if m.indexer_topk else window
    if not causal:
        return window
    if window == seq or (m.chunked and not m.sees_all(layer)):
        return window / 2
    # The first `window` tokens attend to half the window on average, all others to the complete window.
    return window - window * window / (2 * seq)


def scan_flops(m: ModelShape) -> float:
    """Return the forward FLOPs per token of the recurrences, over all layers.

    Mamba: 2 x inner x state, as in NeMo (nemo/utils/flops_formulas.py, `_mamba_layer_flops`, which omits part of the
    scan). Delta net: the state is read twice and updated once, 6 x heads x keys x values.
    """
    kinds = [block for blocks in m.blocks for block in blocks]
    mamba = 2 * m.mamba_heads * m.mamba_head_dim * m.mamba_state
    delta = 6 * m.delta_value_heads * m.delta_key_dim * m.delta_value_dim
    return kinds.count("mamba") * mamba + kinds.count("delta") * delta
