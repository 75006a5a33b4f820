"""Package versions that a job requires, besides those of all recipes (`VERIFIED` in `runtime/runs/versions.py`).

The minimum versions of Transformer Engine are those that megatron-core 0.15.3 requires, with file and line. They are
checked at submission, and stored in run.json, from which each rank reads them at startup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.planner.rules import kernel_rules

if TYPE_CHECKING:
    from superpod.collection.registry import Model, Need
    from superpod.planner.planned_job import PlannedJob

TE = "transformer-engine"

PRECISIONS = {
    "mxfp8": (TE, "2.1", "", "MXFP8 (Megatron-Core, fp8_utils.py:450)"),
    "fp8cs": (TE, "2.2", "", "current scaling (Megatron-Core, fp8_utils.py:457)"),
    "fp8bw": (TE, "2.3", "", "blockwise scaling (Megatron-Core, fp8_utils.py:461)"),
}
"""Precision -> requirement."""

TRITON = (
    "triton",
    "3.0",
    "3.5",
    "the fused permutation of Transformer Engine 2.9 (triton/permutation.py:40) does not compile with later versions; "
    "not needed with model.config.moe_permute_fusion=False",
)
"""Requirement of `moe_permute_fusion`: a kernel calls a function without `@triton.jit`, which later versions reject."""


def required_versions(model: Model, job: PlannedJob) -> list[Need]:
    """Return the package versions that a job of `model` requires, each with a reason."""
    gpu, needs = job.node.gpu, list(model.needs)
    if job.model.sink:
        needs.append((TE, "2.8", "", "learned softmax offsets (Megatron-Core, extensions/transformer_engine.py:969)"))
    if job.model.flash_only:
        needs.append(("flash-attn", "2.1.1", "", "NeMo's configuration allows no other attention backend"))
    if job.model.experts and job.options.permute_fusion:
        needs.append(TRITON)
    if job.precision in PRECISIONS:
        needs.append(PRECISIONS[job.precision])
    if job.options.moments != "fp32":
        needs.append((TE, "2.1", "", "moments below FP32 (Megatron-Core, optimizer_config.py:226)"))
    if job.options.deepep:
        reason = "the flex dispatcher (Megatron-Core, moe/fused_a2a.py), unless with=alltoall is used"
        needs.append(("deep-ep", "1.0", "", reason))
    cudnn = kernel_rules.oldest_cudnn(job)
    if cudnn:
        needs.append(("cudnn", cudnn, "", "fused attention (Transformer Engine 2.9, fused_attn.cpp)"))
    if gpu.cuda:
        needs.append(("cuda", gpu.cuda, "", f"torch's kernels for {gpu.name}"))
    return needs
