"""A recipe as the planner's `PlannedJob`: by its facts, which needs no NeMo, or as it was built and changed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from superpod.collection.facts.adapted_layers import adapted
from superpod.collection.registry import ADAPTERS, Recipe
from superpod.nemo2.build import fusions
from superpod.nemo2.validation.reading import Reader
from superpod.planner import columns, hardware, memory
from superpod.planner.hardware import Hardware
from superpod.planner.models import ModelShape
from superpod.planner.planned_job import Options, PlannedJob
from superpod.planner.rules import kernel_rules

if TYPE_CHECKING:
    import nemo_run as run

NEMO_FIELDS = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "ffn": "ffn_hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_query_groups",
    "channels": "kv_channels",
    "vocab": "vocab_size",
    "experts": "num_moe_experts",
    "topk": "moe_router_topk",
    "expert_ffn": "moe_ffn_hidden_size",
    "shared_ffn": "moe_shared_expert_intermediate_size",
    "kv_lora": "kv_lora_rank",
    "q_lora": "q_lora_rank",
    "qk_nope_dim": "qk_head_dim",
    "qk_rope_dim": "qk_pos_emb_head_dim",
    "v_dim": "v_head_dim",
    "mtp_layers": "mtp_num_layers",
}
"""{field of the planner's `ModelShape`: field of NeMo's configurations}; a configuration may lack some of them."""

GATHERED = ("fp8ds", "fp8cs", "mxfp8")
"""Formats in which the distributed optimizer gathers parameters as FP8; blockwise scales cannot be sharded."""


def gathers_fp8(precision: str, sharding: str) -> bool:
    """Whether parameters are kept and gathered in FP8, half the bytes of BF16; without sharding nothing is gathered."""
    return precision in GATHERED and sharding != "none"


def with_attention(job: PlannedJob) -> PlannedJob:
    """The job with its scores in memory where Transformer Engine has no other attention for it: latent attention on
    A100. It takes the unfused one by itself (utils.py:1100-1119), so NeMo's configuration says nothing of it.
    """
    if not kernel_rules.keeps_scores_unasked(job):
        return job
    return job.replace(options=replace(job.options, attention="unfused"))


def settled(job: PlannedJob) -> PlannedJob:
    """The job with its choice of what MXFP8's parameters are: BF16 where memory holds them, else FP8.

    FP8 ones take 2 bytes instead of 4 (by rows and by columns), and lie in the gradients' buffer while they are
    gathered. Megatron then expects the training loop to copy them there when the gather is to run beside the forward
    pass (megatron-core 0.15.3, core/optimizer/optimizer.py:575-579). NeMo 2.7.3's does not: weights would be zero from
    the first step on, so that the gather must run by itself, after the step. BF16 ones are gathered beside the forward
    pass, as ever: faster wherever they fit, by 4 % in the mean of our sizes.
    """
    *wide, last = with_parameters(with_attention(job))
    within = (bool((memory.reserved(job, columns.of(job)) <= memory.limit(job)).all()) for job in wide)
    return next((job for job, fits in zip(wide, within, strict=True) if fits), last)


def with_parameters(job: PlannedJob) -> list[PlannedJob]:
    """The job with each kind of parameters that `settled` chooses from, the faster first; a search tries each of them:
    what does not fit with one kind, or is illegal, may do with the other.
    """
    if job.precision != "mxfp8" or not gathers_fp8(job.precision, job.layout.sharding):
        return [job]
    kinds = ({"fp8_params": False, "overlap_params": True}, {"fp8_params": True, "overlap_params": False})
    return [job.replace(options=replace(job.options, **kind)) for kind in kinds]


def overlaps_tp(task: str, precision: str, shape: ModelShape) -> bool:
    """Whether Transformer Engine's userbuffers can hide tensor-parallel communication.

    Userbuffers exchange what sequence-parallel regions send. Adapters beside a linear layer interrupt that, as do the
    small projections of latent attention (Megatron switches it off). Userbuffers support no blockwise scales, and they
    are all FP8 or all BF16, whereas current scaling keeps the first and the last layer in BF16. The linear layers of
    cross attention name no buffers, and Megatron-Core 0.15.3 refuses them (extensions/transformer_engine.py).
    """
    return not (task in ADAPTERS or shape.kv_lora or shape.cross_attention or precision in ("fp8bw", "fp8cs"))


def passes_heads(shape: ModelShape) -> bool:
    """Whether context parallelism exchanges heads (cp_comm_type a2a): the only way that Transformer Engine 2.9 has for
    windows that slide and for a learned softmax (context_parallel.py:3803-3829; utils.py:721-728).
    """
    return shape.sink or bool(shape.window and not shape.chunked and not shape.soft_capped)


def refuses_packed(shape: ModelShape) -> str:
    """Why a model takes no packed samples; "" = it does."""
    if knows_no_ends(shape):
        return "NeMo 2.7.3 does not tell it where samples end: its states, and its attention, would run across them"
    if shape.soft_capped:
        return "NeMo 2.7.3's own attention for it refuses them"  # gemma2.py, Gemma2DotProductAttention.forward
    if shape.sink:
        return "Transformer Engine 2.9 has no attention for them with a learned softmax"  # utils.py:704-713
    return ""


def knows_no_ends(shape: ModelShape) -> bool:
    """Whether a model reads every sequence as one sample: NeMo's steps for Mamba, its hybrids and Hyena drop the ends
    of samples (NeMo 2.7.3, gpt/model/ssm.py:50 and hyena.py:153). Causal, they take one padded sample a sequence.
    """
    return "mamba" in shape.kinds


WIDE_RANK_FROM = 60e9
"""Parameters of a dense model from which adapters have rank 16."""


def adapter_rank(shape: ModelShape) -> int:
    """Rank of a model's adapters, as in NeMo 2.7.3's recipes: 8, or 16 from 70 billion parameters on (llama3_8b.py:305,
    llama3_70b.py:322); 32 where experts leave only the attention to be adapted (mixtral_8x7b.py:293).
    """
    if shape.is_moe:
        return 32
    return 16 if shape.parameters().total >= WIDE_RANK_FROM else 8


def decided(task: str, precision: str, sharding: str, shape: ModelShape) -> Options:
    """The planner's options that follow from a recipe's task, precision and sharding, before `settled`."""
    return Options(
        fp8_params=gathers_fp8(precision, sharding),
        fused_loss=task not in ADAPTERS,
        loss_impl=fusions.loss_impl(shape.name, task),
        moments=fusions.moments(shape.name, task, precision, sharding),
        cp_comm="a2a" if passes_heads(shape) else "p2p",
        overlap_tp=overlaps_tp(task, precision, shape),
        lora_targets=adapted(shape, task),
        lora_rank=adapter_rank(shape) if task in ADAPTERS else Options.lora_rank,
    )


def options(recipe: Recipe, num_nodes: int | None = None) -> Options:
    """Those of a recipe at a size."""
    return job(recipe, num_nodes).options


def job(recipe: Recipe, num_nodes: int | None = None, *, facts: Hardware | None = None) -> PlannedJob:
    """The run that a recipe describes at `num_nodes` (default: its smallest size), on its GPU's node and fabric.

    Raises:
        UserError: when the recipe does not declare that size.
    """
    facts = facts or hardware.builtin()
    size = recipe.nodes[0] if num_nodes is None else num_nodes
    node = facts.node(recipe.gpu)
    planned = PlannedJob(
        model=recipe.shape,
        node=node,
        fabric=facts.fabric_of(node),
        gpus=size * recipe.gpus_per_node,
        seq=recipe.seq,
        precision=recipe.precision,
        layout=recipe.layout(size),
        task="lora" if recipe.task == "dora" else recipe.task,
        options=decided(recipe.task, recipe.precision, recipe.layout(size).sharding, recipe.shape),
    )
    deepep = fusions.uses_deepep(recipe.shape, node.gpu, planned.layout)
    return settled(planned.replace(options=replace(planned.options, deepep=deepep)))


def of_partial(partial: run.Partial, recipe: Recipe) -> PlannedJob:
    """The run that a built recipe describes, overrides included.

    Raises:
        UserError: when its model's sizes contradict each other.
    """
    from superpod.nemo2.build.layout import layout_of
    from superpod.nemo2.validation import configured_job, configured_shape

    base = job(recipe)
    precision, task = configured_job.precision_of(partial), configured_job.task_of(partial)
    model = configured_shape.changed(base.model, recipe.model.make().config, partial.model.config)
    layout = layout_of(partial)
    planned = base.replace(
        model=model,
        gpus=partial.trainer.devices * partial.trainer.num_nodes,
        seq=partial.data.seq_length,
        layout=layout,
        precision=precision,
        task=configured_job.planned_task(partial),
        options=options_of(partial, decided(task, precision, layout.sharding, model)),
    )
    return with_attention(planned)


def options_of(partial: run.Partial, base: Options) -> Options:
    """What a configuration says of the planner's options; `base` where it says nothing."""
    from superpod.nemo2.validation import configured_job

    r = Reader(partial)
    config, plugin = partial.model.config, r.precision_plugin
    fused = bool(r["model.config.cross_entropy_loss_fusion"])
    gathers = getattr(plugin, "fp8_param_gather", base.fp8_params) or getattr(plugin, "fp8_params", False)
    eight = configured_job.precision_of(partial) not in ("bf16", "fp16", "fp32")
    callbacks = partial.trainer.callbacks or []
    offload = r["optim.config.optimizer_offload_fraction"] if r["optim.config.optimizer_cpu_offload"] else 0.0
    return replace(
        configured_job.adapters(partial, base),
        grads="bf16" if r["trainer.plugins.grad_reduce_in_fp32"] is False else "fp32",  # it overwrites that of ddp
        fp8_params=bool(gathers) and eight,
        **_overlaps_of(partial, base),
        offload=float(offload or 0),
        optimizer_instances=r["trainer.strategy.num_distributed_optimizer_instances"] or 1,
        moments="bf16" if "bfloat16" in str(r["optim.config.exp_avg_dtype"]) else "fp32",
        fused_loss=fused,
        loss_impl=(r["model.config.cross_entropy_fusion_impl"] or "native") if fused else "native",
        deepep=bool(r["model.config.moe_enable_deepep"]) or any("DeepEP" in _class_of(c) for c in callbacks),
        cp_comm=_cp_comm(config),
        cuda_graphs=records_graphs(config),
        deterministic=bool(r["model.config.deterministic_mode"]),
        hidden_dropout=float(r["model.config.hidden_dropout"] or 0),
        attention_dropout=float(r["model.config.attention_dropout"] or 0),
    )


def _class_of(config: run.Config) -> str:
    import fiddle as fdl

    return getattr(fdl.get_callable(config), "__name__", "") if isinstance(config, fdl.Buildable) else ""


def _cp_comm(config: run.Config) -> Literal["p2p", "a2a", "all_gather"]:
    """How context parallelism passes keys and values; Megatron's default is a ring."""
    given = getattr(config, "cp_comm_type", None)
    kinds = given if isinstance(given, list) else [given]
    if "all_gather" in kinds:
        return "all_gather"
    return "a2a" if "a2a" in kinds else "p2p"


def records_graphs(config: run.Config) -> bool:
    """Whether CUDA graphs are recorded: three fields of Megatron-Core 0.15.3 say so (transformer_config.py)."""
    implementation = getattr(config, "cuda_graph_impl", "none")
    recorded = getattr(config, "enable_cuda_graph", False) or getattr(config, "external_cuda_graph", False)
    return bool(recorded) or implementation not in (None, "none")


def _overlaps_of(partial: run.Partial, base: Options) -> dict[str, bool]:
    """What NeMo's callback overlaps on GPUs; it has the last word on parameters and tensor parallelism."""
    strategy = partial.trainer.strategy
    callback = next((c for c in partial.trainer.callbacks or [] if hasattr(c, "tp_comm_overlap")), None)
    if callback is None:
        return {
            "overlap_params": bool(Reader(partial)["trainer.strategy.ddp.overlap_param_gather"]),
            "overlap_tp": False,
        }
    within = strategy.tensor_model_parallel_size > 1 and strategy.sequence_parallel
    return {
        "overlap_params": callback.overlap_param_gather is not False,
        "overlap_tp": bool(callback.tp_comm_overlap) if within else base.overlap_tp,
    }
