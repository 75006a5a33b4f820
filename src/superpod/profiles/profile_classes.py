"""Classify kernels and operations by name: their class, use of Tensor Cores, and type of parallelism.

The names are those of cuBLAS, cuDNN, CUTLASS, NCCL, Transformer Engine, Apex and PyTorch in traces. They show which
code ran, but not how well it used the hardware.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

CLASSES = ("products", "attention", "norms", "optimizer", "elementwise", "communication", "copies", "gaps", "idle")
"""Classes of time in order of precedence: a moment at which several classes run belongs to the first."""
WORDS = {
    "products": "GEMMs",
    "attention": "attention",
    "norms": "norms",
    "optimizer": "optimizer",
    "elementwise": "elementwise and others",
    "communication": "communication, exposed",
    "copies": "copies, exposed",
    "gaps": "launch gaps",
    "idle": "idle",
}
COMPUTE = ("products", "attention", "norms", "optimizer", "elementwise")

_KERNELS = (
    (
        "communication",
        r"nccl|nvshmem|userbuffers|deep_?ep::|(intra|inter)node::|one_shot_all_reduce|two_shot_all_reduce",
    ),
    ("optimizer", r"multi_?tensor|adam|lamb|l2norm|FusedOptim"),
    ("attention", r"flash|fmha|sdpa|attention|attn|scaled_\w*softmax|masked_softmax|\bmha_"),
    ("norms", r"layer_?norm|rms_?norm|\bln_(fwd|bwd)|norm_(fwd|bwd)|group_?norm"),
    ("products", r"gemm|nvjet|cutlass|xmma|cublas|split_?k|gemv|wgmma|matmul|\bdot_kernel|conv\w*_(fprop|dgrad|wgrad)"),
)
_OPERATIONS = (
    ("communication", r"^(c10d::|gloo:|nccl:|mpi:|ucc:|record_param_comms|_c10d_functional::)"),
    ("attention", r"scaled_dot_product|flash_attention|_softmax\b.*attn"),
    ("norms", r"(layer|rms|group|batch)_norm"),
    (
        "products",
        r"^(aten|mkldnn)::(_?(addmm|mm|bmm|baddbmm|matmul|linear|einsum|addmv|mv|dot|outer)\w*|_scaled_mm|\w*conv)",
    ),
    ("copies", r"^aten::(copy_|_to_copy|to|clone|contiguous|pin_memory)$"),
)
_TENSOR = re.compile(
    r"tensor_?op|tensor\d+x|\d{3,5}(gemm|cudnn)|[hiq]g?mma|wgmma|tcgen05|nvjet|bf16.*xmma|xmma.*(bf16|f16|e4m3|e5m2|tf32)"
    r"|flash|fmha|sdpa|cutlass\w*_(bf16|f16|tf32|e4m3)|mma_?sync",
    re.IGNORECASE,
)
_NO_TENSOR = re.compile(
    r"simt|sgemm|gemv|split_?k_?reduce|dot_kernel|convert|combine|preprocess|_delta\b", re.IGNORECASE
)
_GROUPS = (
    ("ep", r"EXPERT_(MODEL|TENSOR)|\bep\b|deep_?ep|(intra|inter)node::|all_?to_?all"),
    ("dp", r"DATA_PARALLEL|DISTRIBUTED_OPTIMIZER|\bdp\b|\bfsdp\b"),
    ("cp", r"CONTEXT_PARALLEL|\bcp\b"),
    ("tp", r"TENSOR_MODEL_PARALLEL|userbuffers|\btp\b"),
    ("pp", r"PIPELINE|EMBEDDING_GROUP|\bpp\b"),
)

_KERNEL_PATTERNS = [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _KERNELS]
_OPERATION_PATTERNS = [(name, re.compile(pattern)) for name, pattern in _OPERATIONS]
_GROUP_PATTERNS = [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _GROUPS]


def classify_kernel(name: str) -> str:
    """Return the class (one of `CLASSES`) of a GPU kernel by its name."""
    return _match(_KERNEL_PATTERNS, name) or "elementwise"


def classify_operation(name: str) -> str:
    """Return the class of an operation on a CPU by its name; "" if it only contains others, like an autograd node."""
    known_class = _match(_OPERATION_PATTERNS, name)
    if known_class:
        return known_class
    if "::" in name and not name.startswith(("autograd::", "torch::autograd")):
        return "elementwise"
    return ""


def uses_tensor_cores(name: str) -> bool:
    """Return whether a GEMM or attention kernel uses Tensor Cores, according to its name."""
    return bool(_TENSOR.search(name)) and not _NO_TENSOR.search(name)


def classify_group(name: str, group: str = "") -> str:
    """Return the kind of parallelism (tp, cp, ep, dp, pp) of a collective; "" = unknown.

    Megatron-Core names its process groups (`TENSOR_MODEL_PARALLEL_GROUP`), and PyTorch's profiler records the name with
    NCCL kernels. Without a group, only kernel names of tensor and expert parallelism are conclusive: sends and receives
    may belong to pipeline or context parallelism.

    Args:
        name: the name of the kernel.
        group: the description of its process group, if recorded.
    """
    if group:
        return _match(_GROUP_PATTERNS, group)
    return _match([(known, pattern) for known, pattern in _GROUP_PATTERNS if known in ("ep", "tp")], name)


def _match(patterns: Sequence[tuple[str, re.Pattern[str]]], text: str) -> str:
    """Return the name of the first pattern that occurs in `text`; "" if none does."""
    for name, pattern in patterns:
        if pattern.search(text):
            return name
    return ""
