"""Attention in plain torch with context parallelism, which Megatron supports only in TE's attention.

Shapes: b samples, s tokens of a full sequence, cp context-parallel ranks, d channels per head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

from superpod.rehearsal.patches.registry import patch, replace

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch import Tensor


@patch(
    "attention",
    target="megatron.core.transformer.dot_product_attention.DotProductAttention",
    reason="Megatron's own attention supports neither context parallelism nor the arguments of TE's attention, and "
    "needs a mask of sequence x sequence; this one gathers K and V over the CP group and creates its own causal mask",
)
def _patch_attention() -> None:
    import torch
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    original = DotProductAttention.__init__

    def init(
        self: DotProductAttention,
        config: TransformerConfig,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kw: Any,
    ) -> None:
        # MLA's keys are wider (k_channels) than kv_channels, from which the original computes its scale. v_channels is
        # not needed, because `_forward` reads the width of the values from the tensor.
        if k_channels is not None and kw.get("softmax_scale") is None:
            kw["softmax_scale"] = k_channels**-0.5
        with mock.patch.object(config, "context_parallel_size", 1):  # the original asserts that it is 1
            original(self, config, *args, **kw)
        if isinstance(self.softmax_offset, torch.nn.Parameter):  # Megatron leaves it uninitialized
            torch.nn.init.zeros_(self.softmax_offset)
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    replace(DotProductAttention, __init__=init, forward=_forward)


def _forward(
    self: DotProductAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    attn_mask_type: AttnMaskType | None = None,
    attention_bias: Tensor | None = None,
    packed_seq_params: PackedSeqParams | None = None,
) -> Tensor:
    """Compute attention: [s/cp, b, heads, d] -> [s/cp, b, heads * d]; packed sequences have no dimension b."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    cp = self.config.context_parallel_size
    _require_supported(cp, attention_bias, packed_seq_params)
    if packed_seq_params is not None:
        query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
    query_at, key_at, key, value = _gather_context_parallel(cp, query, key, value)

    mask_type = attn_mask_type or self.attn_mask_type
    keep = _build_mask(query_at, key_at, mask_type, self.scale_mask_softmax.window_size)
    if packed_seq_params is not None:
        same_sample = _build_packed_mask(query_at, packed_seq_params)
        keep = same_sample if keep is None else same_sample & keep
    elif keep is None and attention_mask is not None:
        keep = ~attention_mask

    repeats = query.size(2) // key.size(2)  # grouped queries share a key
    key, value = key.repeat_interleave(repeats, 2), value.repeat_interleave(repeats, 2)
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    if self.training and self.attention_dropout.p and not self.config.sequence_parallel:
        tracker: Any = get_cuda_rng_tracker()
        with tracker.fork():
            out = _attend(self, q, k, v, keep)
    else:
        out = _attend(self, q, k, v, keep)
    out = out.permute(2, 0, 1, 3)
    return out.flatten(1) if packed_seq_params is not None else out.flatten(2)


def _attend(self: DotProductAttention, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    """Compute attention where `keep` is True (None = everywhere): [b, heads, s, d] -> [b, heads, s, d]."""
    import torch
    import torch.nn.functional as F

    dropout = self.attention_dropout.p if self.training else 0.0
    if self.softmax_offset is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep, dropout_p=dropout, scale=self.softmax_scale)
    scores = (q @ k.transpose(2, 3)).float() * self.softmax_scale
    if keep is not None:
        scores = scores.masked_fill(~keep, float("-inf"))
    # The attention sink acts as a key without a value.
    sink = self.softmax_offset.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1].to(v.dtype)
    return F.dropout(weights, dropout) @ v


def _require_supported(cp: int, attention_bias: Tensor | None, packed_seq_params: PackedSeqParams | None) -> None:
    """Raise NotImplementedError for an attention bias, or packed sequences with context parallelism."""
    if attention_bias is not None:
        raise NotImplementedError("a rehearsal does not support attention bias; disable it in the recipe")
    if packed_seq_params is not None and cp > 1:
        raise NotImplementedError("a rehearsal does not support packed sequences with CP; disable one in the recipe")


def _build_packed_mask(positions: Tensor, packed: PackedSeqParams) -> Tensor:
    """Return a mask [queries, keys], True where a query and a key belong to the same packed sample."""
    import torch

    starts = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    sample = torch.searchsorted(starts[1:].contiguous().to(positions.dtype), positions, right=True)
    return sample[:, None] == sample[None]


def _gather_context_parallel(
    cp: int, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the positions of this rank's queries and of all keys, and the gathered keys and values of all ranks."""
    import torch
    from megatron.core.parallel_state import get_context_parallel_group
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

    if cp == 1:
        return torch.arange(query.size(0)), torch.arange(key.size(0)), key, value
    group: Any = get_context_parallel_group()
    chunk = query.size(0) // 2

    def positions(rank: int) -> Tensor:
        # As in get_batch_on_this_cp_rank (megatron/core/utils.py): each rank holds an early and a late chunk, because
        # late tokens attend to more keys.
        late_chunk = 2 * cp - 1 - rank
        return torch.cat(
            [torch.arange(rank * chunk, (rank + 1) * chunk), torch.arange(late_chunk * chunk, (late_chunk + 1) * chunk)]
        )

    width = key.size(-1)
    keys_and_values = gather_from_sequence_parallel_region(torch.cat([key, value], -1).contiguous(), group=group)
    key, value = keys_and_values.split([width, keys_and_values.size(-1) - width], -1)
    return positions(group.rank()), torch.cat([positions(rank) for rank in range(cp)]), key, value


def _build_mask(
    query_at: Tensor, key_at: Tensor, mask_type: AttnMaskType | None, window: tuple[int, int] | None
) -> Tensor | None:
    """Return a mask [queries, keys], True where a query attends to a key; None if each query attends to all keys.

    `query_at` and `key_at` are positions. `window` is the number of keys before and after a query; -1 = no limit.
    """
    import torch
    from megatron.core.transformer.enums import AttnMaskType

    distance = query_at[:, None] - key_at[None]
    keep = None
    if mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal):
        keep = distance >= 0
    if window is not None:
        before, after = window
        is_near = torch.ones_like(distance, dtype=torch.bool)
        if before >= 0:
            is_near &= distance <= before
        if after >= 0:
            is_near &= distance >= -after
        keep = is_near if keep is None else keep & is_near
    return keep
