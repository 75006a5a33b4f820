"""Choose the attention backend of a layer as Transformer Engine 2.9 does: flash, fused, unfused, or none.

`fused_attention.py` has the conditions of the compiled kernels. This file has the Python rules of
transformer_engine/pytorch/attention/dot_product_attention/utils.py, `get_attention_backend`, that apply to training
(with the lines in 2.9.0), and the later assertions of context_parallel.py. KV caches and sm120 GPUs are not covered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from superpod.planner.kernels.fused_attention import Fused, FusedAttention, fused_backend

CUDNN = 91301
"""The oldest cuDNN version that supports all recipes: 9.13.1 added the learnable softmax of GPT-OSS."""

ARBITRARY_MASK = "arbitrary"


@dataclass(frozen=True, kw_only=True)
class Attention(FusedAttention):
    """An attention layer in a training step, and the versions of the installed attention libraries."""

    cudnn: int = CUDNN
    cp: int = 1
    """Context-parallel size."""
    cp_comm: str = "p2p"
    """cp_comm_type: p2p, all_gather, a2a, a2a+p2p"""
    pad_between: bool = False
    """Whether packed samples (thd) are padded individually."""
    deterministic: bool = False
    fp8_attention: str = ""
    """FP8 recipe for attention (fp8_dot_product_attention): delayed or current; "" = attention is not in FP8."""
    bias_grad: bool = False
    """Whether the attention bias requires a gradient."""
    flash: bool = True
    """Whether flash-attn 2.7.3 or later is installed, as in NVIDIA's images."""
    flash3: bool = False
    """Whether flash-attn 3 is installed, which is not in those images."""
    backend: str = "auto"
    """Megatron's attention_backend; a value other than auto disables all other backends."""

    @property
    def slides(self) -> bool:
        """Whether the layer has a sliding window."""
        return self.window_left != -1 or self.window_right not in (-1, 0)

    @property
    def causal(self) -> bool:
        """Whether the mask is causal."""
        return "causal" in self.mask


class Reason(NamedTuple):
    """A reason why a backend is not available."""

    text: str
    lines: str
    """Lines in utils.py of Transformer Engine 2.9.0."""
    holds: Callable[[Attention], bool]


def _flash_lacks_mask(a: Attention) -> bool:
    """Return whether FlashAttention does not support the mask: it aligns causal masks to the bottom right."""
    return a.mask == ARBITRARY_MASK or (a.mask in ("causal", "padding_causal") and a.seq_q != a.seq_kv)


def _unsupported_with_cp(a: Attention) -> bool:
    """Return whether neither flash nor fused attention supports the mask or bias with context parallelism."""
    if a.cp == 1:
        return False
    crosses = a.causal and a.seq_q != a.seq_kv
    biased = a.bias not in ("no_bias", "post_scale_bias") or (a.format == "thd" and a.bias != "no_bias")
    return "bottom_right" in a.mask or crosses or biased


def _unsupported_head_size(a: Attention) -> bool:
    return a.head_qk > 256 or a.head_qk % 8 != 0 or (a.head_qk > 192 and a.sm not in (80, 90, 100, 120))


def _unsupported_flash3_heads(a: Attention) -> bool:
    if a.head_qk > 256 or a.heads % a.groups:
        return True
    latent = 128 < a.head_qk <= 192 and 96 < a.head_v <= 128
    return a.head_qk != a.head_v and not (latent or (a.head_qk <= 64 and a.head_v <= 512))


ANY_FLASH = (
    Reason("a different attention_backend is set", "398-411", lambda a: a.backend not in ("auto", "flash")),
    Reason("max_logit", "517-520", lambda a: a.max_logit),
    Reason("padding between packed samples", "657-667", lambda a: a.format == "thd" and a.pad_between),
    Reason("a softmax that is not vanilla", "694-696", lambda a: a.softmax != "vanilla"),
    Reason("context parallelism in FP8", "749-753", lambda a: a.cp > 1 and bool(a.fp8_attention)),
    Reason("context parallelism with this mask or bias", "754-781", _unsupported_with_cp),
    Reason("the mask", "837-854", _flash_lacks_mask),
    Reason("an attention bias", "916-924", lambda a: a.bias not in ("no_bias", "alibi")),
)

FLASH2 = (
    Reason("flash-attn is not installed", "1074-1075", lambda a: not a.flash),
    Reason("the GPU architecture", "417-420", lambda a: a.sm < 80),
    Reason("the precision", "431-437", lambda a: a.dtype not in ("bf16", "fp16")),
    Reason("FP8 attention", "463-466", lambda a: bool(a.fp8_attention)),
    Reason("different head sizes", "576-579", lambda a: a.head_qk != a.head_v),
    Reason("the head size", "602-620", _unsupported_head_size),
    *ANY_FLASH,
)
"""FlashAttention 2."""

FLASH3 = (
    Reason("flash-attn 3 is not installed", "1076-1077", lambda a: not a.flash3),
    Reason("the GPU architecture", "425-428", lambda a: a.sm != 90),
    Reason("the precision", "438-450", lambda a: a.dtype not in ("bf16", "fp16")),
    Reason("FP8 attention", "467-470", lambda a: bool(a.fp8_attention) and a.is_training),
    Reason("the head sizes", "621-650", _unsupported_flash3_heads),
    Reason("dropout", "675-678", lambda a: a.dropout != 0.0),
    Reason("ALiBi", "902-905", lambda a: a.bias == "alibi"),
    *ANY_FLASH,
)
"""FlashAttention 3."""


def _unsupported_current_scaling(a: Attention) -> bool:
    is_old_cudnn = a.cudnn < (91800 if a.deterministic else 91400)
    return a.fp8_attention == "current" and (a.sm < 100 or is_old_cudnn)


def _unsupported_window(a: Attention) -> bool:
    """Return whether fused attention does not support the sliding window."""
    return a.slides and (bool(a.fp8_attention) or a.window_right != 0 or a.dropout != 0.0 or a.seq_q > a.seq_kv)


def _supports_determinism(a: Attention, kernel: Fused) -> bool:
    if not (a.deterministic and a.is_training):
        return True
    return (
        kernel is not Fused.FP8 and a.sm < 100 and (kernel is not Fused.ARBITRARY or (a.sm >= 90 and not a.bias_grad))
    )


def _kernel(a: Attention) -> Fused:
    """Return the cuDNN kernel for a layer; only the kernel for arbitrary lengths supports sliding windows."""
    kernel = fused_backend(replace(a, dtype="fp8") if a.fp8_attention else a)
    if a.window_left != -1 and kernel is not Fused.ARBITRARY:
        return Fused.NONE
    return kernel


FUSED = (
    Reason("a different attention_backend is set", "398-416", lambda a: a.backend not in ("auto", "fused")),
    Reason("the GPU architecture", "421-424", lambda a: a.sm < 80),
    Reason("the precision", "451-461", lambda a: a.dtype not in ("bf16", "fp16", "fp8")),
    Reason("current scaling in FP8", "479-500", _unsupported_current_scaling),
    Reason("max_logit", "521-527", lambda a: a.max_logit and (a.format == "thd" or bool(a.fp8_attention))),
    Reason(
        "different head sizes in one tensor",
        "581-587",
        lambda a: a.head_qk != a.head_v and any(digit in a.qkv_layout for digit in "23"),
    ),
    Reason(
        "a softmax that is not vanilla, with packed samples",
        "704-713",
        lambda a: a.softmax != "vanilla" and a.format == "thd",
    ),
    Reason(
        "a softmax that is not vanilla, with FP8 attention",
        "697-703",
        lambda a: a.softmax != "vanilla" and bool(a.fp8_attention),
    ),
    Reason(
        "a softmax that is not vanilla, with context parallelism other than a2a",
        "721-728",
        lambda a: a.softmax != "vanilla" and a.cp > 1 and a.cp_comm != "a2a",
    ),
    Reason("context parallelism with this mask or bias", "783-812", _unsupported_with_cp),
    Reason(
        "context parallelism of latent attention in FP8",
        "813-818",
        lambda a: a.cp > 1 and bool(a.fp8_attention) and a.head_qk != a.head_v,
    ),
    Reason("the mask", "842-844", lambda a: a.mask == ARBITRARY_MASK),
    Reason("the sliding window", "866-889", _unsupported_window),
    Reason("no cuDNN kernel supports the layer", "956-1004", lambda a: _kernel(a) is Fused.NONE),
    Reason("determinism", "1029-1050", lambda a: not _supports_determinism(a, _kernel(a))),
)
"""FusedAttention, with cuDNN's kernels."""

UNFUSED = (
    Reason("a different attention_backend is set", "402-416", lambda a: a.backend not in ("auto", "unfused")),
    Reason("FP8 attention", "471-475", lambda a: bool(a.fp8_attention)),
    Reason("packed samples", "652-655", lambda a: a.format == "thd"),
    Reason("context parallelism", "743-747", lambda a: a.cp > 1),
)
"""UnfusedDotProductAttention, which stores the attention scores of all pairs of tokens."""


def reasons_against(backend: tuple[Reason, ...], a: Attention) -> list[Reason]:
    """Return the reasons in `backend` (such as FLASH2) that make it unavailable for a layer; [] = available."""
    return [reason for reason in backend if reason.holds(a)]


class Choice(NamedTuple):
    """The attention backend of a layer."""

    backend: str
    """flash, fused or unfused; "" = none, and the first step raises a ValueError."""
    kernel: Fused = Fused.NONE
    """The cuDNN kernel, if the backend is fused."""


def available(a: Attention) -> tuple[bool, bool, bool]:
    """Return whether (flash 2 or 3, fused, unfused) attention is available for a layer."""
    has_flash = not reasons_against(FLASH2, a) or not reasons_against(FLASH3, a)
    return has_flash, not reasons_against(FUSED, a), not reasons_against(UNFUSED, a)


def choose(a: Attention) -> Choice:
    """Return the backend that Transformer Engine chooses: fused attention from Hopper on, else FlashAttention.

    Source: utils.py:1100-1119.

    Examples:
        >>> choose(Attention(sm=90, seq_q=4096, seq_kv=4096, head_qk=128, head_v=128)).backend
        'fused'
        >>> choose(Attention(sm=80, seq_q=4096, seq_kv=4096, head_qk=192, head_v=128)).backend
        'unfused'
    """
    flash, fused, unfused = available(a)
    if fused and not (flash and a.sm < 90):
        return Choice("fused", _kernel(a))
    return Choice("flash" if flash else "unfused" if unfused else "")


WHOLE_HEADS = Reason(
    "context parallelism with a2a requires the heads and the query groups of a rank to be divisible by cp",
    "context_parallel.py:3189-3191",
    lambda a: a.cp_comm == "a2a" and (a.heads % a.cp != 0 or a.groups % a.cp != 0),
)

CP_ASSERTIONS = (
    Reason(
        "context parallelism with a sliding window requires cp_comm a2a or all_gather",
        "context_parallel.py:3803-3809",
        lambda a: a.slides and a.cp_comm not in ("a2a", "all_gather"),
    ),
    Reason(
        "context parallelism with latent attention requires cp_comm p2p",
        "context_parallel.py:3811-3815",
        lambda a: a.head_qk != a.head_v and a.cp_comm not in ("p2p", "a2a+p2p"),
    ),
    Reason(
        "context parallelism with a2a or all_gather does not support packed samples or padding masks",
        "context_parallel.py:2630-2670, 3142-3193",
        lambda a: a.cp_comm in ("a2a", "all_gather") and ("padding" in a.mask or a.format == "thd"),
    ),
    Reason(
        "hierarchical context parallelism (a2a+p2p) does not support packed samples",
        "context_parallel.py:3770-3772",
        lambda a: a.cp_comm == "a2a+p2p" and a.format == "thd",
    ),
    WHOLE_HEADS,
)
"""Transformer Engine's assertions on context parallelism, after it has chosen a backend."""


def failed_assertions(a: Attention) -> list[Reason]:
    """Return Transformer Engine's assertions on context parallelism that fail for a layer."""
    return reasons_against(CP_ASSERTIONS, a) if a.cp > 1 else []
