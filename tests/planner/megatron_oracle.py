"""What Megatron-Core itself says of a job: real configuration, groups, model, batch calculator and schedule, on CPU.

`refusal(job)` is "" where Megatron builds the model that was asked for and runs one training step of it, else what it
raised. It is tiny models on one process: ranks that are not there are played by torch's fake process group, layers are
the rehearsal's (plain torch). Importing this module needs NeMo and changes torch.cuda for the life of the process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import types
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.devnull)  # Megatron compiles a CUDA helper at import, where nvcc is

from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

MEGATRONS_OWN = {"init": DotProductAttention.__init__, "config": TransformerConfig.__post_init__}
"""What the rehearsal replaces: the attention that refuses context parallelism, and the checks of FP8 and graphs."""

from superpod.rehearsal.patches.registry import install, rebind, replace  # noqa: E402
from superpod.rehearsal.proof.meta_build import fake_ranks  # noqa: E402

install()

import torch  # noqa: E402
from megatron.core import num_microbatches_calculator as calculator  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel  # noqa: E402
from megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp import MegatronFSDP  # noqa: E402
from megatron.core.models.gpt import gpt_layer_specs  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, optimizer_config  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import mappings  # noqa: E402
from megatron.core.tensor_parallel import random as checkpointing  # noqa: E402
from megatron.core.transformer import multi_token_prediction, transformer_config  # noqa: E402
from megatron.core.transformer.enums import AttnBackend  # noqa: E402
from megatron.core.transformer.transformer_block import get_num_layers_to_build  # noqa: E402
from megatron.core.utils import get_batch_on_this_cp_rank  # noqa: E402

from superpod.planner.planned_job import PlannedJob  # noqa: E402

for module in (transformer_config, optimizer_config):
    replace(module, is_te_min_version=lambda *_: True)  # the pinned Transformer Engine, which needs a GPU
backward, depth = checkpointing.CheckpointFunction.backward, [0]


def _counted(context: Any, *grads: Any) -> Any:
    """Recomputation's backward, which would call itself until memory ends where an MLP hands on its bias."""
    depth[0] += 1
    try:
        if depth[0] > 20:
            raise RecursionError("the backward pass of recomputation calls itself without end")
        return backward(context, *grads)
    finally:
        depth[0] -= 1


replace(checkpointing.CheckpointFunction, backward=staticmethod(_counted))
no_fp8 = types.SimpleNamespace(is_fp8_enabled=lambda: False)
for name, stand_in in {  # without Transformer Engine, Megatron reads these without having defined them
    "FP8GlobalStateManager": no_fp8,
    "activation_recompute_forward": lambda **_: contextlib.nullcontext(),
    "fp8_autocast": lambda **_: contextlib.nullcontext(),
}.items():
    setattr(checkpointing, name, stand_in)

roll = multi_token_prediction.roll_tensor


def _roll(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Tokens that a rank which is not there should have sent are whatever lies in memory: 0 instead, as all are."""
    rolled, total = roll(tensor, *args, **kwargs)
    return (rolled, total) if rolled.is_floating_point() else (rolled * 0, total * 0)


rebind(multi_token_prediction, "roll_tensor", _roll)


def _copying(reduce: Any) -> Any:
    """Gives a new tensor, as Transformer Engine's products do: MLP adds biases of experts to it in place."""
    forward = reduce.forward
    return staticmethod(lambda context, *args: forward(context, *args).clone())


for region in (mappings._ReduceFromModelParallelRegion, mappings._ReduceScatterToSequenceParallelRegion):
    region.forward = _copying(region)


class Sharded(Exception):
    """Megatron-FSDP has passed its checks and is about to allocate on GPUs."""


def _allocate(self: Any) -> None:
    raise Sharded


MegatronFSDP._init_fsdp_param_and_grad_buffer = _allocate
SHARDED = {"zero2": "optim_grads", "zero3": "optim_grads_params"}
FP8_RECIPES = {"fp8ds": "delayed", "fp8cs": "tensorwise", "fp8bw": "blockwise", "mxfp8": "mxfp8"}


def refusal(job: PlannedJob) -> str:
    """Why Megatron refuses the job; "" = it takes it."""
    layout = job.layout
    try:
        _settings(job)
        per_stage = max(1, job.gpus // layout.pp)
        middle = {1} if layout.pp > 2 and _is_uneven(job) else set()  # else it is as the first
        stages = sorted({0, layout.pp - 1} | middle)
        for stage in stages:
            _one_rank(job, min(stage * per_stage, job.gpus - 1))
    except Exception as refused:  # whatever Megatron raises is its answer
        return f"{type(refused).__name__}: {refused}"[:400] or "refused"
    return ""


def _is_uneven(job: PlannedJob) -> bool:
    layout = job.layout
    given = (layout.first_layers, layout.last_layers, layout.chunks)
    return layout.embedding_as_layer or layout.loss_as_layer or given != (None, None, None)


def _settings(job: PlannedJob) -> None:
    """The checks of the configurations alone, with what only a GPU can run still in them."""
    fp8 = FP8_RECIPES.get(job.precision)
    gpu_only: dict[str, Any] = {"fp8": "hybrid", "fp8_recipe": fp8} if fp8 else {}
    gpu_only |= {"fp8_param": job.options.fp8_params, "moe_grouped_gemm": job.model.is_moe}
    if job.options.overlap_experts:
        mixed = job.precision not in ("fp32", "tf32")
        gpu_only |= {"overlap_moe_expert_parallel_comm": True, "moe_token_dispatcher_type": "alltoall", "bf16": mixed}
    if job.options.cuda_graphs:
        gpu_only |= {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn"}
    with _as_megatron_has_it(TransformerConfig, "__post_init__", MEGATRONS_OWN["config"]):
        _config(job, **gpu_only)
    moments = torch.float32 if job.options.moments == "fp32" else torch.bfloat16
    OptimizerConfig(
        optimizer="adam",
        use_distributed_optimizer=job.layout.sharding != "none",
        use_precision_aware_optimizer=moments is not torch.float32,
        exp_avg_dtype=moments,
        exp_avg_sq_dtype=moments,
        optimizer_cpu_offload=True,  # passes over the look for Transformer Engine's Adam
    )


def _one_rank(job: PlannedJob, rank: int) -> None:
    """Groups, batch calculator, model and one step of one rank.

    Raises:
        Exception: whatever Megatron raises; AssertionError when it built another model without a word.
    """
    layout = job.layout
    local = job.options.impl == "local" or job.options.attention == "local"
    own = _as_megatron_has_it(DotProductAttention, "__init__", MEGATRONS_OWN["init"]) if local else None
    with fake_ranks(rank, job.gpus, **_degrees(job)), own or contextlib.nullcontext():
        calculator.unset_num_microbatches_calculator()
        dp = parallel_state.get_data_parallel_world_size()
        calculator.init_num_microbatches_calculator(1, None, layout.gbs, layout.mbs, dp, False)
        config = _config(job)
        _as_many_layers_as_asked(job, config)
        chunks = [_chunk(job, config, stage) for stage in range(layout.vp or 1)]
        if layout.sharding in SHARDED:
            _shard(job, chunks)
            chunks = [_chunk(job, config, stage) for stage in range(layout.vp or 1)]
        _step(job, chunks)


def _config(job: PlannedJob, **gpu_only: Any) -> TransformerConfig:
    """The job as NeMo writes it into Megatron's configuration."""
    kind = MLATransformerConfig if job.model.kv_lora else TransformerConfig
    return kind(**(_of_model(job) | _of_recompute(job) | _of_layout(job) | PLAIN | gpu_only))


PLAIN: dict[str, Any] = {
    "activation_func": torch.nn.functional.silu,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "pipeline_dtype": torch.float32,
    "deallocate_pipeline_outputs": False,
    "use_cpu_initialization": True,
    "perform_initialization": False,
}


def _of_model(job: PlannedJob) -> dict[str, Any]:
    m = job.model
    shape: dict[str, Any] = {
        "num_layers": m.layers,
        "hidden_size": m.hidden,
        "num_attention_heads": m.heads,
        "kv_channels": m.channels,
        "ffn_hidden_size": m.ffn or m.expert_ffn,
        "mtp_num_layers": m.mtp_layers or None,
        "mtp_loss_scaling_factor": 0.1,
        "gated_linear_unit": m.gated,
        "add_bias_linear": m.bias,
        "normalization": "RMSNorm" if m.norm == "rms" else "LayerNorm",
        "attention_backend": AttnBackend.local if job.options.attention == "local" else AttnBackend.auto,
    }
    if m.is_moe:
        shape |= {
            "num_moe_experts": m.experts,
            "moe_router_topk": m.topk,
            "moe_ffn_hidden_size": m.expert_ffn,
            "moe_shared_expert_intermediate_size": m.shared_ffn or None,
            "moe_layer_freq": [int("moe" in blocks) for blocks in m.blocks],
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
        }
    if not m.kv_lora:
        return shape | {"num_query_groups": m.groups}
    latent = {"kv_lora_rank": m.kv_lora, "q_lora_rank": m.q_lora or None, "v_head_dim": m.v_dim, "rope_type": "rope"}
    return shape | latent | {"qk_head_dim": m.qk_nope_dim, "qk_pos_emb_head_dim": m.qk_rope_dim}


def _of_recompute(job: PlannedJob) -> dict[str, Any]:
    layout = job.layout
    if layout.recompute == "none":
        return {}
    if layout.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(layout.recompute_modules)}
    how = {"recompute_method": layout.recompute_method, "recompute_num_layers": layout.recompute_layers}
    return {"recompute_granularity": "full", **how}


def _of_layout(job: PlannedJob) -> dict[str, Any]:
    layout = job.layout
    overlapped = (layout.vp or 1) > 1 and job.options.overlap_p2p  # as NeMo's overlap callback has it
    return _degrees(job) | {
        "sequence_parallel": layout.sp,
        "account_for_embedding_in_pipeline_split": layout.embedding_as_layer,
        "account_for_loss_in_pipeline_split": layout.loss_as_layer,
        "num_layers_in_first_pipeline_stage": layout.first_layers,
        "num_layers_in_last_pipeline_stage": layout.last_layers,
        "pipeline_model_parallel_layout": _stages(job),
        "overlap_p2p_comm": overlapped,
        "batch_p2p_comm": not overlapped,
    }


def _degrees(job: PlannedJob) -> dict[str, Any]:
    layout = job.layout
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }


def _stages(job: PlannedJob) -> list[list[str]] | None:
    """Given chunks as Megatron writes them."""
    if job.layout.chunks is None:
        return None
    rows = [["decoder"] * count for count in job.layout.chunks]
    rows[0].insert(0, "embedding")
    rows[-1] += ["mtp"] * job.model.mtp_layers + ["loss"]
    return rows


def _as_many_layers_as_asked(job: PlannedJob, config: TransformerConfig) -> None:
    """Megatron does not add up uneven stages: it would train another model without a word."""
    given: Any = config.pipeline_model_parallel_layout
    count: Any = functools.partial(get_num_layers_to_build, config) if given is None else given.get_num_layers_to_build
    chunks = range(job.layout.vp) if job.layout.vp else (None,)
    built = [count(vp_stage=chunk, pp_rank=rank) for rank in range(job.layout.pp) for chunk in chunks]
    if sum(built) != job.model.layers or min(built) < 0:
        raise AssertionError(f"silently: {built} layers are built, {job.model.layers} were asked for")


def _chunk(job: PlannedJob, config: TransformerConfig, stage: int) -> GPTModel:
    m, vp = job.model, job.layout.vp
    specs: Any = gpt_layer_specs
    at: dict[str, Any] = {"ignore_virtual": False, "vp_stage": stage if vp else None}
    if vp:
        parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
    block = specs.get_gpt_decoder_block_spec(config, False, vp_stage=at["vp_stage"])
    mtp = None
    if m.mtp_layers:
        # as NeMo 2.7.3 gives it (gpt/model/base.py, mtp_block_spec): a chunk's own layers, of which there may be none
        mtp = specs.get_gpt_mtp_block_spec(config, block, False, vp_stage=at["vp_stage"])
    return GPTModel(
        config,
        transformer_layer_spec=block,
        mtp_block_spec=mtp,
        vocab_size=m.vocab if m.vocab_divisible_by == 1 else m.padded_vocab(job.layout.tp),
        max_sequence_length=max(job.seq, m.positions),
        share_embeddings_and_output_weights=m.tied,
        position_embedding_type="learned_absolute" if m.positions else "rope",
        pre_process=parallel_state.is_pipeline_first_stage(**at),
        post_process=parallel_state.is_pipeline_last_stage(**at),
        vp_stage=at["vp_stage"],
    )


def _shard(job: PlannedJob, chunks: list[GPTModel]) -> None:
    """Megatron-FSDP around each chunk. Its own checks only: the rest is for GPUs."""
    config = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=job.options.overlap_grads,
        overlap_param_gather=job.options.overlap_params,
        data_parallel_sharding_strategy=SHARDED[job.layout.sharding],
    )
    for chunk in chunks:
        with contextlib.suppress(Sharded):
            FullyShardedDataParallel(chunk.config, config, chunk)


def _step(job: PlannedJob, chunks: list[GPTModel]) -> None:
    """One step of Megatron's schedule: all micro-batches forward and backward."""
    layout, many = job.layout, len(chunks) > 1 or job.layout.vp is not None
    schedule: Any = get_forward_backward_func()
    schedule(
        forward_step_func=functools.partial(_forward, job),
        data_iterator=[None] * len(chunks) if many else None,
        model=chunks if many else chunks[0],
        num_microbatches=calculator.get_num_microbatches(),
        seq_length=job.seq,
        micro_batch_size=layout.mbs,
        forward_only=False,
    )


def _forward(job: PlannedJob, _data: Any, model: GPTModel) -> tuple[Any, Any]:
    tokens = torch.zeros((job.layout.mbs, job.seq), dtype=torch.int64)
    positions = torch.arange(job.seq).expand_as(tokens)
    batch = get_batch_on_this_cp_rank({"tokens": tokens, "labels": tokens, "positions": positions})
    out = model(batch["tokens"], batch["positions"], None, labels=batch["labels"])
    return out, lambda losses: (losses.float().mean(), {})


@contextlib.contextmanager
def _as_megatron_has_it(owner: Any, name: str, original: Any) -> Iterator[None]:
    """Inside, an attribute is what it was before the rehearsal's patches."""
    patched = getattr(owner, name)
    setattr(owner, name, original)
    try:
        yield
    finally:
        setattr(owner, name, patched)
