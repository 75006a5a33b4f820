"""The planner's job of a run of Megatron-LM, from the arguments that its log prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from superpod.errors import UserError
from superpod.reports.runs.run_record import Step

if TYPE_CHECKING:
    from superpod.planner.models import ModelShape
    from superpod.planner.planned_job import PlannedJob

SHAPE = {
    "num_layers": "layers", "hidden_size": "hidden", "ffn_hidden_size": "ffn", "num_attention_heads": "heads",
    "num_query_groups": "kv_heads", "padded_vocab_size": "vocab",
}  # fmt: skip
"""Arguments that make a model -> columns of the planner's tables."""
LAYOUT = {
    "tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "context_parallel_size": "cp",
    "virtual_pipeline_model_parallel_size": "vp", "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp", "micro_batch_size": "mbs", "global_batch_size": "gbs", "seq_length": "seq",
    "world_size": "gpus",
}  # fmt: skip
FLAGS = (
    "ffn_hidden_size",  # else Megatron-LM's own default counts
    *("swiglu", "normalization", "position_embedding_type", "untie_embeddings_and_output_weights", "kv_channels"),
    *("num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_grouped_gemm", "multi_latent_attention"),
    *("sequence_parallel", "use_distributed_optimizer", "recompute_granularity", "recompute_method"),
    *("recompute_num_layers", "overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap", "hidden_dropout"),
    *("attention_dropout", "cross_entropy_loss_fusion", "add_qkv_bias", "transformer_impl"),
)
"""Arguments that the planner takes as they are, where it knows them."""
ALIKE = ("layers", "hidden", "heads", "kv_heads", "ffn", "gated", "experts", "topk", "expert_ffn", "kv_lora", "pattern")
"""Fields of a shape that make two models one."""
NONE = ("None", "none", "")


def parse_count(facts: Mapping[str, str], name: str) -> int | None:
    """A whole number above 0 among printed arguments."""
    text = facts.get(name, "")
    return int(text) if text.isdigit() and int(text) else None


def build_job(
    facts: Mapping[str, str], gpu: str, gpus: int | None, seq: int | None, batch: int | None
) -> tuple[PlannedJob | None, str]:
    """The job of printed arguments on a GPU, or why there is none.

    Raises:
        UserError: the planner knows no such GPU.
    """
    from superpod.planner import hardware
    from superpod.planner.formats import megatron_args
    from superpod.planner.tables import published

    if not gpu:
        return None, "its log does not name the GPU: --gpu does"
    node = hardware.node(gpu)
    if missing := [
        name for name in ("num_layers", "hidden_size", "num_attention_heads") if not parse_count(facts, name)
    ]:
        return None, f"its log does not print Megatron-LM's arguments, such as {missing[0]}"
    if not (gpus and seq and batch):
        return None, "its log does not name its GPUs, sequence length and batch"
    row = {"model": "gpt", "gpu": node.gpu.name, "gpus": str(gpus), "seq": str(seq), "gbs": str(batch)}
    is_fp8 = facts.get("fp8", "None") not in (*NONE, "False")
    row |= {"precision": "fp8" if is_fp8 else "bf16"}
    columns = {column: facts[name] for name, column in (SHAPE | LAYOUT).items() if facts.get(name, "None") not in NONE}
    flags = {name.replace("_", "-"): facts[name] for name in FLAGS if facts.get(name, "None") not in NONE}
    flags |= {"fp8-recipe": facts["fp8_recipe"]} if is_fp8 and "fp8_recipe" in facts else {}
    flags |= {"disable-bias-linear": "true"} if facts.get("add_bias_linear") == "False" else {}
    given = [f"{name}={value}" for name, value in flags.items() if name in megatron_args.TABLE]
    try:
        return _named(published.job({**columns, **row, "flags": "; ".join(given)})), ""
    except UserError as unknown:
        return None, f"the planner cannot read its arguments: {unknown}"


def _named(job: PlannedJob) -> PlannedJob:
    """The job with the name of the known model that has its shape, where there is one, whatever its vocabulary."""
    from superpod.planner import models

    def shape(model: ModelShape) -> tuple[object, ...]:
        return tuple(getattr(model, name) for name in ALIKE)

    known = (model for name in models.names() if shape(model := models.find(name)) == shape(job.model))
    model = next(known, None)
    return job.replace(model=job.model.replace(name=model.name)) if model else job


def add_rates(steps: Sequence[Step], seq: int | None, gpus: int | None, batch: int | None) -> tuple[Step, ...]:
    """Steps with tokens in place of the samples that a log counts, and with tokens/s/GPU, where that can be known."""
    return tuple(
        replace(
            step,
            tokens=step.tokens * seq if step.tokens and seq else None,
            rate=batch * seq / step.seconds / gpus if batch and seq and gpus and step.seconds else step.rate,
        )
        for step in steps
    )
