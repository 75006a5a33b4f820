"""What a kernel or an operation is, by its name: its class, whether it uses Tensor Cores, which parallelism it serves.

Names are those of cuBLAS, cuDNN, CUTLASS, NCCL, Transformer Engine, Apex and PyTorch, as traces of them show. They say
which code ran, and not how well it used the hardware.
"""

from __future__ import annotations

import re

CLASSES = ("products", "attention", "norms", "optimizer", "elementwise", "communication", "copies", "gaps", "idle")
"""Where several run at one moment, the moment belongs to the first of these."""
WORDS = {
    "products": "matrix products",
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

_compiled = {
    "kernels": [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _KERNELS],
    "operations": [(name, re.compile(pattern)) for name, pattern in _OPERATIONS],
    "groups": [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in _GROUPS],
}


def classify_kernel(name: str) -> str:
    """The class of a GPU's kernel."""
    return next((known for known, pattern in _compiled["kernels"] if pattern.search(name)), "elementwise")


def classify_operation(name: str) -> str:
    """The class of an operation on a CPU; "" = no work of its own: autograd's and Python's functions hold others."""
    known = next((known for known, pattern in _compiled["operations"] if pattern.search(name)), "")
    if known:
        return known
    return "elementwise" if "::" in name and not name.startswith(("autograd::", "torch::autograd")) else ""


def uses_tensor_cores(name: str) -> bool:
    """Whether a product or an attention kernel is one for Tensor Cores, by its name."""
    return bool(_TENSOR.search(name)) and not _NO_TENSOR.search(name)


def classify_group(name: str, group: str = "") -> str:
    """tp, cp, ep, dp or pp that a collective serves: by the name of its process group, or of its kernel; "" = unknown.

    Megatron-Core names its groups (`TENSOR_MODEL_PARALLEL_GROUP`), and PyTorch's profiler writes that beside kernels of
    NCCL. A send or receive is of the pipeline where nothing says otherwise; context parallelism sends too.
    """
    if known := next((known for known, pattern in _compiled["groups"] if pattern.search(group)), ""):
        return known
    if group:
        return ""
    return next((known for known, pattern in _compiled["groups"] if known in ("ep", "tp") and pattern.search(name)), "")
