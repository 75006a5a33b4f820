"""The planner's jobs for Megatron-LM runs, from the arguments in their logs."""

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
"""Model argument of Megatron-LM -> column of the planner's tables."""
LAYOUT = {
    "tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "context_parallel_size": "cp",
    "virtual_pipeline_model_parallel_size": "vp", "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp", "micro_batch_size": "mbs", "global_batch_size": "gbs", "seq_length": "seq",
    "world_size": "gpus",
}  # fmt: skip
FLAGS = (
    "ffn_hidden_size",  # without it, Megatron-LM's default applies
    *("swiglu", "normalization", "position_embedding_type", "untie_embeddings_and_output_weights", "kv_channels"),
    *("num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_grouped_gemm", "multi_latent_attention"),
    *("sequence_parallel", "use_distributed_optimizer", "recompute_granularity", "recompute_method"),
    *("recompute_num_layers", "overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap", "hidden_dropout"),
    *("attention_dropout", "cross_entropy_loss_fusion", "add_qkv_bias", "transformer_impl"),
)
"""Arguments that are passed to the planner unchanged, if it supports them."""
COMPARED_FIELDS = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "ffn",
    "gated",
    "experts",
    "topk",
    "expert_ffn",
    "kv_lora",
    "pattern",
)
"""Fields of a model shape that identify the model."""
REQUIRED_ARGUMENTS = ("num_layers", "hidden_size", "num_attention_heads")
NONE_TEXTS = ("None", "none", "")


def parse_count(facts: Mapping[str, str], name: str) -> int | None:
    """Return the argument `name` as a positive integer; None if it is missing or not one."""
    text = facts.get(name, "")
    return int(text) if text.isdigit() and int(text) else None


def build_job(
    facts: Mapping[str, str], gpu: str, gpus: int | None, seq: int | None, batch: int | None
) -> tuple[PlannedJob | None, str]:
    """Return (job, "") for the arguments of a run, or (None, reason) if it cannot be planned.

    Args:
        facts: Megatron-LM's arguments by name.
        gpu: type of the GPUs; "" if unknown.
        gpus: number of GPUs.
        seq: sequence length in tokens.
        batch: global batch size in samples.

    Raises:
        UserError: the GPU is unknown to the planner.
    """
    from superpod.planner import hardware
    from superpod.planner.tables import published

    if not gpu:
        return None, "its log does not contain the GPU type; specify it with --gpu"
    node = hardware.node(gpu)
    missing_arguments = [name for name in REQUIRED_ARGUMENTS if not parse_count(facts, name)]
    if missing_arguments:
        return None, f"its log does not contain Megatron-LM's arguments, such as {missing_arguments[0]}"
    if not (gpus and seq and batch):
        return None, "its log does not contain the number of GPUs, the sequence length or the batch size"

    is_fp8 = facts.get("fp8", "None") not in (*NONE_TEXTS, "False")
    row = {
        column: facts[name] for name, column in (SHAPE | LAYOUT).items() if facts.get(name, "None") not in NONE_TEXTS
    }
    row |= {"model": "gpt", "gpu": node.gpu.name, "gpus": str(gpus), "seq": str(seq), "gbs": str(batch)}
    row |= {"precision": "fp8" if is_fp8 else "bf16", "flags": "; ".join(_list_flags(facts, is_fp8=is_fp8))}
    try:
        return _name_model(published.job(row)), ""
    except UserError as error:
        return None, f"the planner cannot read its arguments: {error}"


def _list_flags(facts: Mapping[str, str], *, is_fp8: bool) -> list[str]:
    """Return the arguments that the planner supports as texts `name=value`."""
    from superpod.planner.formats import megatron_args

    flags = {name.replace("_", "-"): facts[name] for name in FLAGS if facts.get(name, "None") not in NONE_TEXTS}
    if is_fp8 and "fp8_recipe" in facts:
        flags["fp8-recipe"] = facts["fp8_recipe"]
    if facts.get("add_bias_linear") == "False":
        flags["disable-bias-linear"] = "true"
    return [f"{name}={value}" for name, value in flags.items() if name in megatron_args.TABLE]


def _name_model(job: PlannedJob) -> PlannedJob:
    """Return the job with the name of the known model of the same shape (except the vocabulary), if there is one."""
    from superpod.planner import models

    def shape(model: ModelShape) -> tuple[object, ...]:
        return tuple(getattr(model, name) for name in COMPARED_FIELDS)

    job_shape = shape(job.model)
    for name in models.names():
        known_model = models.find(name)
        if shape(known_model) == job_shape:
            return job.replace(model=job.model.replace(name=known_model.name))
    return job


def add_rates(steps: Sequence[Step], seq: int | None, gpus: int | None, batch: int | None) -> tuple[Step, ...]:
    """Return steps with tokens instead of samples, and with tokens/s/GPU, as far as the sizes are known."""
    converted_steps = []
    for step in steps:
        tokens = step.tokens * seq if step.tokens and seq else None
        rate = step.rate
        if batch and seq and gpus and step.seconds:
            rate = batch * seq / step.seconds / gpus
        converted_steps.append(replace(step, tokens=tokens, rate=rate))
    return tuple(converted_steps)
