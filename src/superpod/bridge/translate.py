"""Convert a built NeMo recipe to the sections of Megatron-Bridge's `ConfigContainer`.

Both stacks configure Megatron-Core, so most fields keep their names. The model itself comes from its Hugging Face
configuration; only the fields that determine how it is trained are written: parallelism, recomputation, kernels,
dispatcher, and whatever the recipe or an override changed. Does not import Megatron-Bridge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from superpod.bridge import architectures, facts
from superpod.errors import UserError
from superpod.nemo2.export import flatten

if TYPE_CHECKING:
    import nemo_run as run

Values = dict[str, object]
"""Field -> value: a plain value, a torch.dtype, an enum, or a list or dictionary of them."""

EXECUTION_FIELDS = (
    *("seq_length", "attention_backend", "apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion"),
    *("masked_softmax_fusion", "persist_layer_norm", "deallocate_pipeline_outputs"),
    *("cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "calculate_per_token_loss", "cp_comm_type"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *("distribute_saved_activations", "microbatch_group_size_per_vp_stage", "mtp_num_layers"),
    *("moe_grouped_gemm", "moe_permute_fusion", "moe_router_dtype", "moe_token_dispatcher_type"),
    *("moe_shared_expert_overlap", "moe_aux_loss_coeff", "moe_router_load_balancing_type"),
)
"""Fields of the model that determine how it is executed, not which function it computes. They are always written,
because Megatron-Bridge's providers have defaults of their own; those that are None only if `WRITTEN_IF_NONE`.
`gradient_accumulation_fusion` is missing: both stacks enable it if its kernel is installed."""

WRITTEN_IF_NONE = ("virtual_pipeline_model_parallel_size", "pipeline_dtype", "recompute_granularity", "mtp_num_layers")

STRATEGY_FIELDS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"),
    *("pipeline_dtype", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    "pipeline_model_parallel_layout",
)
"""Fields of NeMo's MegatronStrategy that Megatron-Bridge has in the model."""

CHECKPOINT_FIELDS = {
    "ckpt_async_save": "async_save",
    "ckpt_parallel_save": "fully_parallel_save",
    "ckpt_parallel_load": "fully_parallel_load",
    "ckpt_assume_constant_structure": "ckpt_assume_constant_structure",
    "save_ckpt_format": "ckpt_format",
}
"""Field of MegatronStrategy -> field of CheckpointConfig."""

RENAMED_PRECISION_FIELDS = {
    "fp16_loss_scale": "loss_scale",
    "fp16_initial_loss_scale": "initial_loss_scale",
    "fp16_min_loss_scale": "min_loss_scale",
    "fp16_loss_scale_window": "loss_scale_window",
    "fp16_hysteresis": "hysteresis",
}
"""Field of MegatronMixedPrecision -> field of MixedPrecisionConfig."""

NOT_NEEDED = ("TimingCallback", "MegatronCommOverlapCallback", "GarbageCollectionCallback", "DeepEPCallback")
"""Callbacks that a field of the configuration replaces; the step time is always logged."""


@dataclass
class BridgeConfig:
    """A recipe for Megatron-Bridge."""

    hf_model: str
    """Hugging Face ID, or a folder with config.json, from which the model is created."""
    world_size: int
    """Number of GPUs for which the layout was chosen."""
    gpus_per_node: int
    is_pretraining: bool
    model: Values
    """Fields to set on the model provider."""
    sections: dict[str, Values]
    """Name of a section, as in facts.stack()["fields"] -> its fields."""
    peft: tuple[str, Values] | None = None
    """Class of the adapters, LoRA or DoRA, and its fields."""
    userbuffers: str | None = None
    """Name of Megatron-Bridge's tuned userbuffer configuration."""
    not_carried: list[str] = field(default_factory=list)
    """What the NeMo recipe sets and Megatron-Bridge has no field for, one line each."""


def translate(partial: run.Partial, hf_model: str, base: run.Config | None = None) -> BridgeConfig:
    """Convert a built NeMo recipe.

    Args:
        partial: the recipe, with data, size and overrides applied.
        hf_model: Hugging Face ID or folder of the model.
        base: the model before the recipe changed it; default: NeMo's class with its default values.

    Raises:
        UserError: Megatron-Bridge cannot build the model.
    """
    config_class = partial.model.config.__fn_or_cls__.__name__
    reason = architectures.missing_reason(config_class, hf_model)
    if reason:
        raise UserError(f"cannot export to Megatron-Bridge: {reason}", "docs/bridge.md lists the models of both stacks")
    trainer = partial.trainer
    result = BridgeConfig(
        hf_model=hf_model,
        world_size=trainer.num_nodes * trainer.devices,
        gpus_per_node=trainer.devices,
        is_pretraining=partial.__fn_or_cls__.__name__ == "pretrain",
        model={},
        sections={},
    )
    result.model = _model(partial, base, result.not_carried)
    result.sections = {
        "train": _train(partial),
        "validation": {"eval_interval": trainer.val_check_interval, "eval_iters": trainer.limit_val_batches},
        "optimizer": _known("optimizer", _arguments(partial.optim.config), result.not_carried),
        "scheduler": _scheduler(partial, result.not_carried),
        "ddp": _known("ddp", _arguments(trainer.strategy.ddp), result.not_carried),
        "dataset" if result.is_pretraining else "sft_dataset": _dataset(partial, result),
        "logger": {"log_interval": trainer.log_every_n_steps},
        "tokenizer": _tokenizer(partial, hf_model),
        "checkpoint": _checkpoint(partial),
        "mixed_precision": _precision(trainer.plugins, result.not_carried),
        "comm_overlap": _comm_overlap(partial, result),
    }
    result.sections["optimizer"]["min_lr"] = partial.optim.lr_scheduler.min_lr
    if getattr(trainer.strategy, "fsdp", None) == "megatron":
        result.sections["dist"] = {"use_megatron_fsdp": True}
    if getattr(partial, "peft", None):
        adapters = partial.peft
        result.peft = (
            adapters.__fn_or_cls__.__name__,
            _known("peft", _arguments(adapters), result.not_carried),
        )
    result.not_carried += [f"callback {name}" for name in _callbacks(partial) if name not in NOT_NEEDED]
    return result


def _arguments(config: Any) -> Values:
    return {name: value for name, value in config.__arguments__.items() if isinstance(name, str)}


def _known(section: str, values: Mapping[str, Any], not_carried: list[str]) -> Values:
    """Return the fields that the section has; add a line to `not_carried` for each of the others."""
    for name in values:
        if not facts.has_field(section, name):
            not_carried.append(f"{section}.{name} = {values[name]!r}: no such field")
    return {name: value for name, value in values.items() if facts.has_field(section, name)}


def _model(partial: run.Partial, base: run.Config | None, not_carried: list[str]) -> Values:
    """Return the fields of the model provider: parallelism, execution, and what the recipe or an override changed."""
    config, strategy = partial.model.config, partial.trainer.strategy
    values: Values = {}
    for owner, names in ((strategy, STRATEGY_FIELDS), (config, EXECUTION_FIELDS)):
        for name in names:
            value = getattr(owner, name, None)
            if value is not None or name in WRITTEN_IF_NONE:
                values[name] = value
    before = _arguments(base.config) if base is not None else {}
    changed = {name: value for name, value in _arguments(config).items() if before.get(name, _MISSING) != value}
    for name, value in changed.items():
        if callable(value) and not isinstance(value, type):
            not_carried.append(f"model.{name}: a function")
        elif name in ("fp8", "fp8_recipe"):
            continue  # set by the mixed precision of the recipe
        elif facts.has_field("model", name):
            values[name] = value
        else:
            not_carried.append(f"model.{name} = {value!r}: no such field")
    if values.pop("moe_enable_deepep", False) or "DeepEPCallback" in _callbacks(partial):
        values |= {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}
        values["moe_shared_expert_overlap"] = False
    if not getattr(config, "num_moe_experts", None):
        values = {name: value for name, value in values.items() if not name.startswith("moe_")}
    return values


_MISSING = object()


def _callbacks(partial: run.Partial) -> Iterator[str]:
    for callback in partial.trainer.callbacks or []:
        yield getattr(callback, "__fn_or_cls__", type(callback)).__name__


def _train(partial: run.Partial) -> Values:
    values: Values = {
        "train_iters": partial.trainer.max_steps,
        "micro_batch_size": partial.data.micro_batch_size,
        "global_batch_size": partial.data.global_batch_size,
    }
    for callback in partial.trainer.callbacks or []:
        if callback.__fn_or_cls__.__name__ == "GarbageCollectionCallback":
            values |= {"manual_gc": True, "manual_gc_interval": callback.gc_interval_train}
    return values


def _scheduler(partial: run.Partial, not_carried: list[str]) -> Values:
    schedule = partial.optim.lr_scheduler
    name = schedule.__fn_or_cls__.__name__
    if name != "CosineAnnealingScheduler":
        not_carried.append(f"learning-rate schedule {name}: written as cosine decay")
    if getattr(schedule, "constant_steps", 0):
        not_carried.append(f"constant_steps = {schedule.constant_steps} at the end of the learning-rate schedule")
    return {
        "lr_decay_style": "cosine",
        "lr_decay_iters": partial.trainer.max_steps,
        "lr_warmup_iters": schedule.warmup_steps,
        "start_weight_decay": partial.optim.config.weight_decay,
        "end_weight_decay": partial.optim.config.weight_decay,
        "weight_decay_incr_style": "constant",
    }


def _dataset(partial: run.Partial, result: BridgeConfig) -> Values:
    """Return the dataset: random tokens, a blend of Megatron's indexed datasets, or a folder of JSONL files."""
    data = partial.data
    if not result.is_pretraining:
        root = getattr(data, "dataset_root", None)
        if root is None:
            root = "data"
            result.not_carried.append(
                "mock data: `dataset_root` must be a folder with training.jsonl and validation.jsonl"
            )
        return {"dataset_root": str(root), "seq_length": data.seq_length, "dataloader_type": "batch"}
    values: Values = {"seq_length": data.seq_length, "random_seed": 1234, "num_workers": data.num_workers}
    values |= {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
    values |= {"dataloader_type": "single", "split": getattr(data, "split", None) or "9999,8,2"}
    paths = getattr(data, "paths", None)
    values["blend"] = None if paths is None else _blend(paths)
    return values


def _blend(paths: Any) -> tuple[list[str], list[float] | None]:
    """Convert NeMo's blend, [prefix...] or [weight, prefix, ...], to a tuple of prefixes and weights."""
    parts = [str(part) for part in ([paths] if isinstance(paths, str) else paths)]
    try:
        return parts[1::2], [float(part) for part in parts[::2]]
    except ValueError:
        return parts, None


def _tokenizer(partial: run.Partial, hf_model: str) -> Values:
    tokenizer: Any = getattr(partial.data, "tokenizer", None)
    name = getattr(getattr(tokenizer, "__fn_or_cls__", None), "__name__", "")
    if name == "NullTokenizer":
        return {"tokenizer_type": "NullTokenizer", "vocab_size": tokenizer.vocab_size}
    if name == "SentencePieceTokenizer":
        return {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": tokenizer.model_path}
    path = getattr(tokenizer, "pretrained_model_name", None) or hf_model
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": path}


def _checkpoint(partial: run.Partial) -> Values:
    strategy, ckpt = partial.trainer.strategy, partial.log.ckpt
    values: Values = {"save": "checkpoints", "load": "checkpoints"}
    values["save_interval"] = getattr(ckpt, "every_n_train_steps", None)
    keep = getattr(ckpt, "save_top_k", None)
    if isinstance(keep, int) and keep > 0:
        values["most_recent_k"] = keep
    for nemo_name, name in CHECKPOINT_FIELDS.items():
        value = strategy.__arguments__.get(nemo_name)
        if value is not None:
            values[name] = value
    restore = getattr(partial.resume, "restore_config", None)
    if restore is not None:
        values["pretrained_checkpoint"] = "pretrained"
    return values


def _precision(plugin: Any, not_carried: list[str]) -> Values:
    """Return the fields of MixedPrecisionConfig. Its `bf16`, `fp16` and `fp32` replace NeMo's `precision`."""
    arguments = _arguments(plugin)
    precision = str(arguments.pop("precision", "bf16-mixed"))
    values: Values = {"bf16": precision.startswith("bf16"), "fp16": precision.startswith("16")}
    renamed = {RENAMED_PRECISION_FIELDS.get(name, name): value for name, value in arguments.items()}
    return values | _known("mixed_precision", renamed, not_carried)


def _comm_overlap(partial: run.Partial, result: BridgeConfig) -> Values:
    values: Values = {"tp_comm_overlap": False}
    for callback in partial.trainer.callbacks or []:
        if callback.__fn_or_cls__.__name__ != "MegatronCommOverlapCallback":
            continue
        arguments = _arguments(callback)
        tuned = arguments.pop("tp_comm_overlap_cfg", None)
        values |= _known("comm_overlap", arguments, result.not_carried)
        if tuned is not None:
            result.userbuffers = _find_userbuffers(tuned, result.not_carried)
    return values


def _find_userbuffers(config: Any, not_carried: list[str]) -> str | None:
    name = flatten.find_userbuffers_name(config).rpartition(".")[2]
    if name in facts.stack()["userbuffers"]:
        return name
    not_carried.append(f"userbuffers {name or 'of the recipe'}: Transformer Engine's defaults are used")
    return None
