"""Which versions a run needs beside those that every recipe is proven with (`PROVEN` of `runtime/runs/versions.py`).

Least versions of Transformer Engine are those that megatron-core 0.15.3 asks for, file and line beside each. They go
into run.json, where the start of a rank reads them, and into the checks of a submission.
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
"""Precision -> what it needs."""


def of(model: Model, job: PlannedJob) -> list[Need]:
    """What a run of this model needs, with the reason of each."""
    gpu, needs = job.node.gpu, list(model.needs)
    if job.model.sink:
        needs.append((TE, "2.8", "", "a learned softmax offset (Megatron-Core, extensions/transformer_engine.py:969)"))
    if job.precision in PRECISIONS:
        needs.append(PRECISIONS[job.precision])
    if job.options.moments != "fp32":
        needs.append((TE, "2.1", "", "moments below FP32 (Megatron-Core, optimizer_config.py:226)"))
    if job.options.deepep:
        needs.append(("deep-ep", "1.0", "", "the flex dispatcher (Megatron-Core, moe/fused_a2a.py); or with=alltoall"))
    if least := kernel_rules.oldest_cudnn(job):
        needs.append(("cudnn", least, "", "attention that keeps no scores (Transformer Engine 2.9, fused_attn.cpp)"))
    if gpu.cuda:
        needs.append(("cuda", gpu.cuda, "", f"torch's kernels for {gpu.name}"))
    return needs
