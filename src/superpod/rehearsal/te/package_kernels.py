"""Substitutes for kernels of other packages: results of the right shape, with gradients for their first input."""

from __future__ import annotations

from typing import Any


def empty_like_first(x: Any, *_: Any, **__: Any) -> Any:
    """Return a tensor with the shape and type of the first input."""
    return x * 1


def attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Any:
    """Return a tensor with the shape of the queries `q`, but the head size of the values `v`."""
    return q * 1 if q.shape[-1] == v.shape[-1] else q[..., : v.shape[-1]] * 1


def attention_forward(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> tuple[Any, ...]:
    """Return (output, log-sum-exp, probabilities, generator state), like flash-attn 2.7."""
    import torch

    statistics = torch.empty((q.shape[0], q.shape[-2], q.shape[1]), dtype=torch.float32, device="meta")
    return attention(q, k, v), statistics, None, torch.empty(2, dtype=torch.int64, device="meta")


def do_nothing(*_: Any, **__: Any) -> None:
    """Do nothing, in place of a kernel that only writes to existing tensors."""


def mamba_mixer(zxbcdt: Any, conv_weight: Any, conv_bias: Any, dt_bias: Any, a: Any, **given: Any) -> Any:
    """Return the output of mamba-ssm's mixer, [batch, length, heads x head size] (ops/triton/ssd_combined.py)."""
    head = given["headdim"] or given["D"].shape[-1]
    return zxbcdt[..., : a.shape[0] * head] * 1


def batch_per_block(queries: int, keys: int, batch: int, heads: int) -> int:
    """Return the rows of scores per thread block: 4 warps, 2 rows each for up to 128 keys (scaled_masked_softmax.h)."""
    power = next_power_of_2(keys)
    warp = min(power, 32)
    return (128 // warp) * (2 if power <= 128 else 1)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of 2 that is at least `number`, like triton.next_power_of_2."""
    return 1 << max(0, (number - 1).bit_length())


def cdiv(number: int, divisor: int) -> int:
    """Return the quotient rounded up, like triton.cdiv."""
    return -(-number // divisor)


class Norm:
    """Replaces APEX's fused norms, which are autograd functions."""

    apply = forward = staticmethod(empty_like_first)


FUNCTIONS: dict[str, dict[str, Any]] = {
    "apex.contrib.layer_norm.layer_norm": {"FastLayerNormFN": Norm},
    "apex.normalization.fused_layer_norm": {"FusedLayerNormAffineFunction": Norm},
    "triton": {"next_power_of_2": next_power_of_2, "cdiv": cdiv},
    "flash_attn.flash_attn_interface": {
        "flash_attn_func": attention,
        "flash_attn_varlen_func": attention,
        "_flash_attn_forward": attention_forward,
        "_flash_attn_varlen_forward": attention_forward,
        "_flash_attn_backward": do_nothing,
        "_flash_attn_varlen_backward": do_nothing,
    },
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba_split_conv1d_scan_combined": mamba_mixer,
        "mamba_chunk_scan_combined": empty_like_first,
    },
    "causal_conv1d": {"causal_conv1d_fn": empty_like_first},
    "scaled_masked_softmax_cuda": {
        "get_batch_per_block": batch_per_block,
        "forward": empty_like_first,
        "backward": empty_like_first,
    },
    "scaled_upper_triang_masked_softmax_cuda": {"forward": empty_like_first, "backward": empty_like_first},
    "scaled_softmax_cuda": {"forward": empty_like_first, "backward": empty_like_first},
}
"""{module: {function: substitute}}."""
