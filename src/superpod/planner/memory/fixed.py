"""Sizes that do not depend on the schedule: checkpoints, and memory for inference."""

from __future__ import annotations

from dataclasses import dataclass

from superpod.errors import UserError, did_you_mean
from superpod.planner.models import ModelShape, Split
from superpod.planner.models.work import BYTES
from superpod.planner.planned_job import PlannedJob


@dataclass(frozen=True)
class Inference:
    """Bytes on the GPU with the highest memory use."""

    weights: float
    kv_cache: float
    """KV cache of all sequences in the batch at full length."""
    kv_per_token: float

    @property
    def total(self) -> float:
        """Bytes of weights and KV cache."""
        return self.weights + self.kv_cache


def inference(model: ModelShape, split: Split, seq: int, batch: int, dtype: str = "bf16", cache: str = "") -> Inference:
    """Return the memory for inference of `batch` sequences of `seq` tokens, on the GPU with the highest memory use.

    KV cache per token = 2 x layers x groups x head size x bytes, sharded over min(tp, groups). MLA's latent vector is
    replicated on every tensor-parallel rank. `cache` is the dtype of the cache (default: `dtype`).

    Raises:
        UserError: the split does not divide the model, or a dtype is unknown.
    """
    for name in (dtype, cache or dtype):
        if name not in BYTES:
            raise UserError(f"there is no data type {name!r}", did_you_mean(name, list(BYTES)) or ", ".join(BYTES))
    stages = [model.parameters(split, stage).total for stage in range(split.pp)]
    layers = [sum(len(r) for r in split.stage_layers(model.layers, stage)) for stage in range(split.pp)]
    share = max(layers) / model.layers / (1 if model.kv_lora else min(split.tp, model.groups))
    cached = cache or dtype
    return Inference(
        weights=float(BYTES[dtype] * max(stages)),
        kv_cache=batch * share * model.kv_cache_bytes(seq, cached),
        kv_per_token=share * model.kv_bytes_per_token(cached),
    )


def checkpoint_bytes(job: PlannedJob) -> int:
    """Return the bytes of a distributed checkpoint: 14 per parameter for BF16 weights, fp32 master weights and moments.

    LoRA saves only the adapters, also 14 bytes per parameter; fp32 training saves 12.
    """
    from superpod.planner import columns
    from superpod.planner.memory import lora
    from superpod.planner.memory.units import MemoryUnits

    per = 12 if job.precision in ("fp32", "tf32") else 14
    if job.task == "lora":
        u = MemoryUnits(job, columns.from_job(job))
        return int(per * lora.adapters(u).dense.sum() * job.layout.tp)
    return per * job.model.parameters().total
