"""Count the parameters of one rank exactly, as compared with Megatron in tests/planner/models/test_models_megatron.py.

Every `*_block` function counts one block on one rank. It uses plain arithmetic with `//`, so tp, ep and etp may also be
numpy arrays. Source: megatron-core 0.15.3 with Transformer Engine layers; each docstring names the module. Norms,
routers, biases of row-parallel layers and MLA's down-projections are replicated on all tensor-parallel ranks.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeAlias

from superpod.errors import UserError
from superpod.planner.rules import rules

if TYPE_CHECKING:
    from superpod.planner.models.shape import ModelShape
    from superpod.planner.models.stages import Split


Degree: TypeAlias = Any
"""An integer or an array of integers; the fields of the resulting `Parameters` have the same type."""


@dataclass(frozen=True)
class Parameters:
    """Number of parameters by category. Only `experts` are sharded by EP and reduced over the expert DP group."""

    embedding: int = 0
    """Word embeddings and learned positions."""
    attention: int = 0
    mamba: int = 0
    """Mamba and gated delta-net mixers."""
    mlp: int = 0
    """Dense MLPs and the latent projections around routed experts."""
    experts: int = 0
    """Routed experts."""
    shared_experts: int = 0
    router: int = 0
    norms: int = 0
    head: int = 0
    """The output layer, or the copy of the embedding if tied."""
    mtp: int = 0
    """Input projections of multi-token-prediction layers; their blocks are counted in the other categories."""

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: int) -> Parameters:
        return Parameters(*(getattr(self, f.name) * times for f in fields(self)))

    @property
    def total(self) -> int:
        """Sum over all categories."""
        return sum(getattr(self, f.name) for f in fields(self))

    @property
    def dense(self) -> int:
        """Sum over all categories except routed experts: those that the dense DP group shards."""
        return self.total - self.experts


def stage_parameters(m: ModelShape, split: Split, stage: int) -> list[Parameters]:
    """Return the parameters of each model chunk on one rank of a pipeline stage.

    Raises:
        UserError: the split does not divide a size of the model.
    """
    inputs = rules.ModelInputs(
        tp=split.tp,
        pp=split.pp,
        vp=split.vp,
        ep=split.ep,
        etp=split.expert_tp,
        interleaved=split.vp > 1,
        uneven=not split.is_plain,
        model=m,
    )
    for violation in rules.check(rules.MODEL, inputs):
        raise UserError(f"{m.name}: {violation.message}", violation.fix)
    chunks = []
    for virtual, layers in enumerate(split.stage_layers(m.layers, stage)):
        first = stage == 0 and virtual == 0
        last = stage == split.pp - 1 and virtual == split.vp - 1
        chunks.append(sum(_layer_parameters(m, split, layers), ends(m, split, first, last)))
    return chunks


def _layer_parameters(m: ModelShape, split: Split, layers: range) -> list[Parameters]:
    """Return the parameters of `layers` on one rank, one item per kind of block and per width of dense MLPs."""
    kinds = Counter(block for i in layers for block in m.blocks[i] if block != "mlp")
    widths = Counter(m.widths[i] for i in layers if m.widths[i])
    block_counts = [block_parameters(m, kind, split.tp, split.ep, split.expert_tp) * n for kind, n in kinds.items()]
    return block_counts + [mlp_block(m, split.tp, ffn=width) * n for width, n in widths.items()]


def ends(m: ModelShape, split: Split, first: bool, last: bool) -> Parameters:
    """Return the parameters outside the layers on one rank of a chunk: embedding, head, final norm, MTP (gpt_model.py).

    `first` and `last`: whether the chunk is the first or the last of the model.
    """
    matrix = m.padded_vocab(split.tp) * m.hidden // split.tp
    embedding = matrix + m.positions * m.hidden
    total = Parameters()
    if first or (last and m.mtp_layers):
        total += Parameters(embedding=embedding)
    if last:
        total += Parameters(norms=_norm(m, m.hidden), head=0 if m.tied and first else matrix)
        total += mtp_layer(m, split.tp, split.ep, split.expert_tp) * m.mtp_layers
    return total


def mtp_layer(m: ModelShape, tp: Degree = 1, ep: Degree = 1, etp: Degree = 1) -> Parameters:
    """Count the parameters of MultiTokenPredictionLayer: norms of both inputs, projection, a layer, a final norm."""
    projection = Parameters(mtp=2 * m.hidden * m.hidden // tp, norms=3 * _norm(m, m.hidden))
    layer = (block_parameters(m, block, tp, ep, etp) for block in m.mtp_blocks)
    return sum(layer, projection)


def block_parameters(m: ModelShape, block: str, tp: Degree = 1, ep: Degree = 1, etp: Degree = 1) -> Parameters:
    """Count the parameters on one rank of a block: `attention`, `mla`, `mamba`, `delta`, `mlp` or `moe`."""
    return _BLOCKS[block](m, tp, ep, etp)


def attention_block(m: ModelShape, tp: Degree = 1, ep: Degree = 1, etp: Degree = 1) -> Parameters:
    """Count SelfAttention: queries (and their gate), keys, values; the projection; norms of queries and keys."""
    q, kv = m.heads * m.channels, m.groups * m.channels
    wide = q * (2 if m.attention_gate else 1) + 2 * kv
    matrices = m.hidden * wide // tp + q * m.hidden // tp
    biases = (m.bias or m.qkv_bias) * (wide // tp) + (m.bias or m.proj_bias) * m.hidden
    qk_norms = _norm(m, q) + _norm(m, kv) if m.qk_norm_whole else 2 * _norm(m, m.channels)
    norms = _norm(m, m.hidden) * (2 if m.post_norms else 1) + m.qk_norm * qk_norms
    return Parameters(attention=matrices + biases + m.sink * (m.heads // tp), norms=norms)


def mla_block(m: ModelShape, tp: Degree = 1, ep: Degree = 1, etp: Degree = 1) -> Parameters:
    """Count MLASelfAttention: low-rank or direct queries, low-rank keys and values with a shared rotary key."""
    qk = m.qk_nope_dim + m.qk_rope_dim
    queries = m.hidden * m.heads * qk // tp
    if m.q_lora:
        queries = m.hidden * m.q_lora + m.q_lora * m.heads * qk // tp
    keys = m.hidden * (m.kv_lora + m.qk_rope_dim) + m.kv_lora * m.heads * (m.qk_nope_dim + m.v_dim) // tp
    indexer = m.indexer_heads * (m.q_lora * m.indexer_dim + m.hidden) + m.hidden * m.indexer_dim
    norms = _norm(m, m.hidden) + _norm(m, m.kv_lora) + _norm(m, m.q_lora) + 2 * m.indexer_dim
    output = m.heads * m.v_dim * m.hidden // tp
    return Parameters(attention=queries + keys + output + (indexer if m.indexer_heads else 0), norms=norms)


def mlp_block(m: ModelShape, tp: Degree = 1, ep: Degree = 1, etp: Degree = 1, ffn: int | None = None) -> Parameters:
    """Count MLP of width `ffn` with the norm before it, and with post-norms (Gemma 2 and 3) the norm after it."""
    norms = _norm(m, m.hidden) * ((2 if m.post_norms else 1) - m.one_norm)
    width = m.ffn if ffn is None else ffn
    return Parameters(mlp=_feed_forward(m, m.hidden, width, tp, m.bias or m.mlp_bias), norms=norms)


def moe_block(m: ModelShape, tp: Degree = 1, ep: Degree = 1, etp: Degree = 1) -> Parameters:
    """Count MoELayer: router, routed experts / (ep x etp), shared experts / tp, replicated latent projections."""
    return Parameters(
        experts=m.experts // ep * _feed_forward(m, m.latent or m.hidden, m.expert_ffn, etp, m.bias),
        shared_experts=_feed_forward(m, m.hidden, m.shared_ffn, tp, False) + m.shared_gate * m.hidden,
        router=m.experts * m.hidden + m.bias * m.experts,
        mlp=2 * m.hidden * m.latent,
        norms=_norm(m, m.hidden),
    )


def mamba_block(m: ModelShape, tp: Degree = 1, ep: Degree = 1, etp: Degree = 1) -> Parameters:
    """Count MambaMixer: in_proj (z, x, B, C, dt), convolution with bias, dt_bias, A_log, D, gated norm, out_proj."""
    inner, states = m.mamba_heads * m.mamba_head_dim, 2 * m.mamba_groups * m.mamba_state
    matrices = m.hidden * (2 * inner + states + m.mamba_heads) // tp + inner * m.hidden // tp
    return Parameters(mamba=matrices + elementwise(m, "mamba", tp), norms=_norm(m, m.hidden))


def delta_block(m: ModelShape, tp: Degree = 1, ep: Degree = 1, etp: Degree = 1) -> Parameters:
    """Count GatedDeltaNet (megatron-core 0.16): in_proj (q, k, v, gate, beta, alpha), convolution, decay, out_proj."""
    keys, values = m.delta_key_heads * m.delta_key_dim, m.delta_value_heads * m.delta_value_dim
    matrices = m.hidden * (2 * keys + 2 * values + 2 * m.delta_value_heads) // tp + values * m.hidden // tp
    return Parameters(mamba=matrices + elementwise(m, "delta", tp), norms=_norm(m, m.hidden))


def elementwise(m: ModelShape, block: str, tp: Degree = 1) -> Degree:
    """Count the parameters of a `mamba` or `delta` mixer outside GEMMs: convolution, decay, norm; 0 for other kinds."""
    if block == "mamba":
        inner, states = m.mamba_heads * m.mamba_head_dim, 2 * m.mamba_groups * m.mamba_state
        return (m.conv + 1) * ((inner + states) // tp) + 3 * (m.mamba_heads // tp) + inner // tp
    if block == "delta":
        mixed = 2 * m.delta_key_heads * m.delta_key_dim + m.delta_value_heads * m.delta_value_dim
        return m.conv * (mixed // tp) + 2 * (m.delta_value_heads // tp) + m.delta_value_dim
    return 0


_BLOCKS = {
    "attention": attention_block,
    "mla": mla_block,
    "mlp": mlp_block,
    "moe": moe_block,
    "mamba": mamba_block,
    "delta": delta_block,
}


def _norm(m: ModelShape, size: int) -> int:
    """Count the parameters of a norm over `size` elements: RMSNorm has a weight, LayerNorm a weight and a bias."""
    return size if m.norm == "rms" else 2 * size


def _feed_forward(m: ModelShape, hidden: int, ffn: int, tp: Degree, bias: bool) -> Degree:
    """Count the parameters of an MLP on one rank: up and down projection (and gate), biases if `bias`."""
    up = 2 * ffn if m.gated else ffn
    return hidden * up // tp + ffn * hidden // tp + bias * (up // tp + hidden)
