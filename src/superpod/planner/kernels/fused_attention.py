"""Choose cuDNN's fused attention kernel for a layer as Transformer Engine 2.9 does: `fused_backend`.

The rules are those of `nvte_get_fused_attn_backend` in transformer_engine/common/fused_attn/fused_attn.cpp, with one
condition per property (architecture, heads, mask, window, ...); a layer must meet all of them. See `kernels` for the
line numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

INT32 = 2**31 - 1

NO_MASK, PADDING, CAUSAL, PADDING_CAUSAL = "no_mask", "padding", "causal", "padding_causal"
BOTTOM_RIGHT, PADDING_BOTTOM_RIGHT = "causal_bottom_right", "padding_causal_bottom_right"


class Fused(IntEnum):
    """NVTE_Fused_Attn_Backend (transformer_engine/common/include/transformer_engine/fused_attn.h)."""

    NONE = -1
    MAX512 = 0
    ARBITRARY = 1
    FP8 = 2


@dataclass(frozen=True, kw_only=True)
class FusedAttention:
    """An attention layer with the properties that the C++ rules use, named as in `AttentionParams`.

    Sizes are those on one rank.
    """

    sm: int
    """Compute capability times ten: 80, 90, 100, 103."""
    cudnn: int
    """cudnnGetVersion(): 91301 is 9.13.1."""
    is_training: bool = True
    dtype: str = "bf16"
    """Data type of queries, keys and values: bf16, fp16 or fp8; no other type has a kernel."""
    qkv_layout: str = "sbhd_sbhd_sbhd"
    bias: str = "no_bias"
    """no_bias, pre_scale_bias, post_scale_bias, alibi"""
    mask: str = CAUSAL
    softmax: str = "vanilla"
    """vanilla, off-by-one, learnable"""
    dropout: float = 0.0
    heads: int = 16
    groups: int = 16
    """Number of key-value heads."""
    seq_q: int = 128
    seq_kv: int = 128
    """Maximum sequence lengths in tokens."""
    head_qk: int = 64
    head_v: int = 64
    window_left: int = -1
    window_right: int = -1
    """Sliding window in tokens; -1 = unlimited."""
    max_logit: bool = False
    wanted: int | None = None
    """NVTE_FUSED_ATTN_BACKEND: the kernel to use if two are available (sequences up to 512); None = not set."""

    @property
    def q_format(self) -> str:
        """Format of the queries: sbhd, bshd or thd."""
        return _format(self.qkv_layout.removeprefix("paged_kv_").split("_")[0])

    @property
    def kv_format(self) -> str:
        """Format of keys and values: sbhd, bshd or thd."""
        return _format(self.qkv_layout.split("_")[-1]) if "_" in self.qkv_layout else self.q_format

    @property
    def format(self) -> str:
        """The format of queries, keys and values; if they differ, both formats, such as `sbhd_2bshd`."""
        return self.q_format if self.q_format == self.kv_format else f"{self.q_format}_2{self.kv_format}"

    @property
    def paged(self) -> bool:
        """Whether keys and values are paged (inference)."""
        return self.qkv_layout.startswith("paged_kv")

    @property
    def padded(self) -> bool:
        """Whether all sequences are padded to the same length: sbhd or bshd."""
        return self.format in ("sbhd", "bshd")

    @property
    def ragged_64(self) -> bool:
        """Whether the offsets of packed samples need 64 bits (fused_attn/utils.cu, get_ragged_offset_dtype)."""
        if self.format != "thd":
            return False
        q, k = self.heads * self.head_qk * self.seq_q, self.groups * self.head_qk * self.seq_kv
        v = self.groups * self.head_v * self.seq_kv
        if "3" in self.qkv_layout:
            q = k = v = 3 * q
        elif "2" in self.qkv_layout:
            k = v = 2 * k
        return max(q, k, v) > INT32


def _format(part: str) -> str:
    """Return the format (thd, sbhd or bshd) for one part of a layout name, such as bs3hd or th2d."""
    return "thd" if part.startswith("t") else "sbhd" if part.startswith("sb") else "bshd"


class Condition(NamedTuple):
    """One part of the C++ condition for a kernel; a layer must meet all parts."""

    name: str
    lines: str
    """Lines in fused_attn.cpp."""
    holds: Callable[[FusedAttention], bool]


def fused_backend(a: FusedAttention) -> Fused:
    """Return the cuDNN kernel that Transformer Engine 2.9 chooses for a layer; `Fused.NONE` if none supports it.

    Examples:
        >>> fused_backend(FusedAttention(sm=90, cudnn=91301, seq_q=4096, seq_kv=4096, head_qk=192, head_v=128)).name
        'ARBITRARY'
        >>> fused_backend(FusedAttention(sm=80, cudnn=91301, seq_q=4096, seq_kv=4096, head_qk=192, head_v=128)).name
        'NONE'
    """
    if not unmet_conditions(FP8, a):
        return Fused.FP8
    arbitrary, max512 = not unmet_conditions(ARBITRARY, a), not unmet_conditions(MAX512, a)
    kernel = Fused.ARBITRARY if arbitrary else Fused.NONE
    if a.seq_q <= 512 and a.seq_kv <= 512:  # fused_attn.cpp:459-472
        kernel = Fused.ARBITRARY if arbitrary else Fused.MAX512 if max512 else Fused.NONE
        if (a.wanted == Fused.MAX512 and max512) or (a.wanted == Fused.ARBITRARY and arbitrary):
            kernel = Fused(a.wanted)
    if (kernel is Fused.MAX512 and a.cudnn < 8901) or (kernel is Fused.ARBITRARY and a.cudnn < 8900):
        return Fused.NONE  # fused_attn.cpp:473-486
    return kernel


def unmet_conditions(kernel: tuple[Condition, ...], a: FusedAttention) -> tuple[Condition, ...]:
    """Return the conditions of a kernel that a layer does not meet; () = the kernel is available."""
    return tuple(condition for condition in kernel if not condition.holds(a))


def _fp8_shape(a: FusedAttention) -> bool:
    """Return whether an FP8 kernel of any of three cuDNN generations supports the head sizes, mask and lengths."""
    head_sizes = {a.head_qk, a.head_v}
    first = a.cudnn >= 8900 and a.sm < 100 and a.qkv_layout == "t3hd" and a.seq_q == a.seq_kv <= 512
    first = first and head_sizes == {64} and a.mask == PADDING
    second = a.cudnn >= 90201 and a.sm < 100 and a.seq_q % 128 == a.seq_kv % 128 == 0
    second = second and head_sizes == {128} and a.mask in (CAUSAL, NO_MASK)
    widest = 128 if a.sm >= 100 or a.is_training else 256
    sizes = max(head_sizes) <= widest and (a.sm >= 100 or not a.is_training or head_sizes == {128})
    third = a.cudnn >= 90700 and sizes and a.head_qk % 16 == a.head_v % 16 == 0
    third = third and a.mask in (NO_MASK, CAUSAL, PADDING, PADDING_CAUSAL)
    return first or second or third


FP8 = (
    Condition("dtype", "227", lambda a: a.dtype == "fp8"),
    Condition("architecture", "228", lambda a: a.sm >= 90),
    Condition("bias", "228", lambda a: a.bias == "no_bias"),
    Condition("head sizes, mask and length", "229-251", _fp8_shape),
    Condition("format", "252", lambda a: a.padded),
    Condition("offsets", "253", lambda a: not a.ragged_64),
    Condition("softmax", "253", lambda a: a.softmax == "vanilla"),
    Condition("cuDNN 9.10.0", "255", lambda a: a.cudnn != 91000),
    Condition("max_logit", "255", lambda a: not a.max_logit),
)
"""NVTE_FP8, for queries, keys and values in FP8 (fp8_dot_product_attention)."""

_MAX512_MASKS = (CAUSAL, PADDING, PADDING_CAUSAL, NO_MASK)
_MAX512_LAYOUTS = ("sb3hd", "sbhd_sb2hd", "bs3hd", "bshd_bs2hd", "bshd_bshd_bshd")

MAX512 = (
    Condition("dtype", "264", lambda a: a.dtype in ("fp16", "bf16")),
    Condition("architecture", "267", lambda a: a.sm in (80, 90)),
    Condition("length", "267-268", lambda a: max(a.seq_q, a.seq_kv) <= 512 and a.seq_q % 64 == a.seq_kv % 64 == 0),
    Condition("head sizes", "268-269", lambda a: a.head_qk == a.head_v == 64),
    Condition("groups", "269", lambda a: a.heads == a.groups),
    Condition("bias", "270-271", lambda a: a.bias in ("no_bias", "post_scale_bias")),
    Condition(
        "mask",
        "272-276",
        lambda a: a.mask in _MAX512_MASKS and (a.mask != PADDING_CAUSAL or a.seq_q == a.seq_kv),
    ),
    Condition("layout", "277-281", lambda a: a.qkv_layout in _MAX512_LAYOUTS),
    Condition("window", "282", lambda a: a.window_left == -1 and a.window_right in (-1, 0)),
    Condition("offsets", "283", lambda a: not a.ragged_64),
    Condition("softmax", "284", lambda a: a.softmax == "vanilla"),
    Condition("max_logit", "284", lambda a: not a.max_logit),
)
"""NVTE_F16_max512_seqlen, for sequences of up to 512 tokens."""


def _architecture(a: FusedAttention) -> bool:
    if a.cudnn < 8903:
        return a.sm in (80, 90)
    return a.sm >= 80 and (a.sm < 100 or a.cudnn >= 90700)


def _head_sizes(a: FusedAttention) -> bool:
    """Return whether the head sizes are supported: multiples of 8; above 128 only on some architectures."""
    if a.head_qk % 8 or a.head_v % 8:
        return False
    widest = max(a.head_qk, a.head_v)
    mla = (a.head_qk, a.head_v) == (192, 128)
    inference = not a.is_training
    fits = (
        widest <= 128
        or (widest <= 256 and a.sm == 90 and a.cudnn >= (90500 if a.is_training else 90100))
        or (inference and a.sm >= 100 and a.cudnn >= 90900 and a.seq_q > 1 and not a.paged)
        or (inference and a.cudnn >= 91002 and (a.paged or a.seq_q > 1 or a.mask not in (CAUSAL, PADDING_CAUSAL)))
        or (mla and a.is_training and a.sm >= 100 and a.cudnn >= 91100)
    )
    bug = a.cudnn >= 91100 and a.is_training and a.sm == 90 and not mla  # 9.11 and later, backward, Hopper
    return fits and not (bug and min(a.head_qk, a.head_v) >= 128 and a.head_qk != a.head_v)


def _bias(a: FusedAttention) -> bool:
    if a.cudnn < 8906 or a.bias == "no_bias":
        return a.bias == "no_bias"
    if a.bias == "alibi":
        return a.sm >= 90 and a.mask in (CAUSAL, BOTTOM_RIGHT)
    return a.bias == "post_scale_bias" and a.sm >= (80 if a.cudnn >= 90000 else 90)


def _mask(a: FusedAttention) -> bool:
    """Return whether the mask is supported by the cuDNN release."""
    if a.cudnn < 8906:
        return a.mask == CAUSAL
    plain = a.bias == "no_bias" and a.dropout == 0.0
    aligned = a.seq_q % 64 == a.seq_kv % 64 == 0 and a.seq_q <= a.seq_kv
    return (
        (a.padded and a.mask in (CAUSAL, PADDING, PADDING_CAUSAL, NO_MASK))
        or (a.cudnn >= 90100 and a.format == "thd" and a.mask in (PADDING, PADDING_CAUSAL))
        or (a.cudnn >= 90300 and a.padded and a.mask == BOTTOM_RIGHT and aligned and plain)
        or (a.cudnn >= 90500 and a.paged and plain and _paged_mask(a, aligned))
        or (a.cudnn >= 90600 and a.mask == PADDING_BOTTOM_RIGHT and aligned and plain)
        or (a.cudnn >= 90700 and _latest_mask(a, plain))
    )


def _paged_mask(a: FusedAttention, is_aligned: bool) -> bool:
    return a.mask in (PADDING, PADDING_CAUSAL) or (a.mask == PADDING_BOTTOM_RIGHT and is_aligned)


def _latest_mask(a: FusedAttention, is_plain: bool) -> bool:
    if a.mask in (NO_MASK, CAUSAL):
        return True
    padded = a.mask in (PADDING, PADDING_CAUSAL, PADDING_BOTTOM_RIGHT) and is_plain
    return padded or (a.mask in (BOTTOM_RIGHT, PADDING_BOTTOM_RIGHT) and a.seq_q <= a.seq_kv)


def _formats(a: FusedAttention) -> bool:
    """Return whether the format is supported: packed samples need Hopper, and groups = heads before cuDNN 9.6."""
    if a.padded:
        return True
    packed = a.sm >= 90 and ((a.cudnn >= 90100 and a.heads == a.groups) or a.cudnn >= 90600)
    if a.format == "thd" and packed:
        return True
    parts = (a.q_format, a.kv_format)
    return a.cudnn >= 90700 and any(part != "thd" or a.sm >= 90 for part in parts)


def _window(a: FusedAttention) -> bool:
    """Return whether the window is supported: sliding windows must extend only backwards, and require a causal mask.

    The source at the commit in `kernels` also allows any mask and limits on both sides; the compiled 2.9.0 does not.
    """
    if a.window_left == -1 and a.window_right in (-1, 0):
        return True
    slides = a.window_left >= -1 and a.window_right == 0 and a.seq_q <= a.seq_kv
    if a.cudnn < 90200 or not slides or a.bias != "no_bias" or a.dropout != 0.0:
        return False
    if a.padded and (a.mask == CAUSAL or (a.mask == BOTTOM_RIGHT and a.seq_q == a.seq_kv)):
        return True
    # Bottom-right masks with different lengths of queries and keys fail on sm100 up to cuDNN 9.7.0.
    bottom = a.sm < 100 or a.cudnn > 90700 or a.seq_q == a.seq_kv
    return a.cudnn >= 90600 and a.mask in (PADDING_CAUSAL, *(BOTTOM_RIGHT, PADDING_BOTTOM_RIGHT) * bottom)


ARBITRARY = (
    Condition("dtype", "264", lambda a: a.dtype in ("fp16", "bf16")),
    Condition("architecture", "289-292", _architecture),
    Condition("length", "293-295", lambda a: a.cudnn >= 90000 or a.seq_q % 64 == a.seq_kv % 64 == 0),
    Condition("groups", "296-298", lambda a: a.cudnn >= 8907 or a.heads == a.groups),
    Condition("head sizes", "299-326", _head_sizes),
    Condition("bias", "327-339", _bias),
    Condition("mask", "340-384", _mask),
    Condition(
        "bias with padding",
        "385-389",
        lambda a: a.cudnn < 8906 or a.mask not in (PADDING, PADDING_CAUSAL) or a.bias != "post_scale_bias",
    ),
    Condition("format", "390-399", _formats),
    Condition("window", "400-434", _window),
    Condition("offsets", "435-436", lambda a: not a.ragged_64 or a.cudnn >= 90500),
    Condition("cuDNN 9.10.0 and 9.10.1", "437-438", lambda a: a.cudnn not in (91000, 91001)),
    Condition("softmax", "439-443", lambda a: a.softmax == "vanilla" or a.cudnn >= 91301),
)
"""NVTE_F16_arbitrary_seqlen, for sequences of any length; nearly all training uses it."""
