"""Convert a built NeMo recipe to the sections of Megatron-Bridge's `ConfigContainer`.

Both stacks configure Megatron-Core, so most fields keep their names. The architecture comes from the model's Hugging
Face configuration; the fields that determine how the model is trained are written: parallelism, recomputation, kernels,
dispatcher, initialization, losses, and whatever the recipe or an override changed. Does not import Megatron-Bridge.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from superpod.bridge import architectures, facts
from superpod.errors import UserError
from superpod.nemo2.export import flatten
from superpod.nemo2.validation.reading import class_name

if TYPE_CHECKING:
    import nemo_run as run

Values = dict[str, object]
"""Field -> value: a plain value, a torch.dtype, an enum, or a list or dictionary of them."""

PARALLEL_FIELDS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"),
    *("pipeline_dtype", "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("pipeline_model_parallel_layout", "use_te_rng_tracker"),
)
"""Fields of NeMo's MegatronStrategy that Megatron-Bridge has in the model."""

EXECUTION_FIELDS = (
    *("seq_length", "attention_backend", "apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion"),
    *("masked_softmax_fusion", "persist_layer_norm", "deallocate_pipeline_outputs"),
    *("cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "calculate_per_token_loss", "cp_comm_type"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *("distribute_saved_activations", "microbatch_group_size_per_vp_stage"),
    *("moe_grouped_gemm", "moe_permute_fusion", "moe_token_dispatcher_type", "moe_shared_expert_overlap"),
)
"""Fields of the model that determine how it is executed. They are always written, because Megatron-Bridge's providers
have defaults of their own. `gradient_accumulation_fusion` is missing: both stacks enable it if its kernel is
installed."""

TRAINING_FIELDS = (
    *("mtp_num_layers", "moe_router_dtype", "moe_aux_loss_coeff", "moe_router_load_balancing_type"),
    *("attention_dropout", "hidden_dropout"),
)
"""Fields of the model that change the loss, but not the trained weights' meaning. They are always written."""

PRETRAINING_FIELDS = (
    *("init_method_std", "share_embeddings_and_output_weights", "rotary_base", "layernorm_epsilon"),
    *("make_vocab_size_divisible_by", "vocab_size"),
)
"""Fields in which some of NeMo's classes differ from the Hugging Face configuration, such as an initialization with a
smaller standard deviation. They are written for pretraining; fine-tuning must use those of the pretrained weights."""

WRITTEN_IF_NONE = ("virtual_pipeline_model_parallel_size", "pipeline_dtype", "recompute_granularity", "mtp_num_layers")
"""Fields that are written even if they are None, which is not the default of every provider."""

CHECKPOINT_FIELDS = {
    "ckpt_async_save": "async_save",
    "ckpt_parallel_save": "fully_parallel_save",
    "ckpt_parallel_load": "fully_parallel_load",
    "ckpt_assume_constant_structure": "ckpt_assume_constant_structure",
    "ckpt_load_strictness": "dist_ckpt_strictness",
    "ckpt_optim_fully_reshardable": "dist_ckpt_optim_fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": "distrib_optim_fully_reshardable_mem_efficient",
    "save_ckpt_format": "ckpt_format",
}
"""Field of MegatronStrategy -> field of CheckpointConfig."""

DISTRIBUTED_FIELDS = {
    "use_tp_pp_dp_mapping": "use_tp_pp_dp_mapping",
    "use_sharp": "use_sharp",
    "nccl_communicator_config_path": "nccl_communicator_config_path",
}
"""Field of MegatronStrategy -> field of DistributedInitConfig."""

RENAMED_PRECISION_FIELDS = {
    "fp16_loss_scale": "loss_scale",
    "fp16_initial_loss_scale": "initial_loss_scale",
    "fp16_min_loss_scale": "min_loss_scale",
    "fp16_loss_scale_window": "loss_scale_window",
    "fp16_hysteresis": "hysteresis",
}
"""Field of MegatronMixedPrecision -> field of MixedPrecisionConfig."""

DATA_FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
"""Flags of NeMo's data modules that GPTDatasetConfig has, too. All are off by default."""

HANDLED = {
    "data": {*DATA_FLAGS, "paths", "seq_length", "micro_batch_size", "global_batch_size", "split", "tokenizer", "seed"}
    | {"num_workers", "index_mapping_dir", "dataset_root", "packed_sequence_specs"},
    "trainer": {"accelerator", "strategy", "callbacks", "plugins", "max_steps", "num_nodes", "devices"}
    | {"val_check_interval", "limit_val_batches", "limit_test_batches", "log_every_n_steps"}
    | {"accumulate_grad_batches", "use_distributed_sampler"},
    "trainer.strategy": {*PARALLEL_FIELDS, *CHECKPOINT_FIELDS, *DISTRIBUTED_FIELDS, "ddp", "fsdp"}
    | {"gradient_as_bucket_view"},
    "optim": {"config", "lr_scheduler"},
    "optim.lr_scheduler": {"warmup_steps", "constant_steps", "min_lr", "max_steps"},
    "log": {"ckpt", "name", "tensorboard"},
    "resume": {"restore_config", "resume_if_exists", "resume_ignore_no_checkpoint"},
    "log.ckpt": {"monitor", "mode", "save_top_k", "save_last", "save_optim_on_train_end", "filename"}
    | {"every_n_train_steps"},
}
"""Part of the recipe -> arguments that are translated, or that Megatron-Bridge does not need."""

REPLACED_CALLBACKS = (
    *("TimingCallback", "MegatronCommOverlapCallback", "GarbageCollectionCallback", "DeepEPCallback"),
)
"""Callbacks that a field of the configuration replaces; Megatron-Bridge always logs the step time."""


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
    not_translated: list[str] = field(default_factory=list)
    """What the NeMo recipe sets and the exported file does not, one line each."""


def translate(partial: run.Partial, name: str, hf_model: str, base: run.Config | None = None) -> BridgeConfig:
    """Convert a built NeMo recipe.

    Args:
        partial: the recipe, with data, size and overrides applied.
        name: name of the recipe, for its folder of checkpoints.
        hf_model: Hugging Face ID or folder of the model.
        base: the model before the recipe changed it; default: NeMo's class with its default values.

    Raises:
        UserError: Megatron-Bridge cannot build the model.
    """
    reason = architectures.missing_reason(class_name(partial.model.config), hf_model)
    if reason:
        raise UserError(f"cannot export to Megatron-Bridge: {reason}", "docs/bridge.md lists the models of both stacks")
    trainer, strategy = partial.trainer, partial.trainer.strategy
    result = BridgeConfig(
        hf_model=hf_model,
        world_size=trainer.num_nodes * trainer.devices,
        gpus_per_node=trainer.devices,
        is_pretraining=class_name(partial) == "pretrain",
        model={},
        sections={},
    )
    lines = result.not_translated
    result.model = _model(partial, base, result)
    is_tokenized = result.is_pretraining or hasattr(partial.data, "paths")
    result.sections = {
        "train": _train(partial),
        "validation": {"eval_interval": trainer.val_check_interval, "eval_iters": trainer.limit_val_batches},
        "optimizer": _known("optimizer", _arguments(partial.optim.config), lines),
        "scheduler": _scheduler(partial, lines),
        "ddp": _known("ddp", _arguments(strategy.ddp), lines),
        "dist": {new: value for old, new in DISTRIBUTED_FIELDS.items() if (value := _argument(strategy, old))},
        "dataset" if is_tokenized else "sft_dataset": _tokens(partial) if is_tokenized else _samples(partial, lines),
        "logger": {"log_interval": trainer.log_every_n_steps},
        "tokenizer": _tokenizer(partial, result),
        "checkpoint": _checkpoint(partial, name, hf_model),
        "mixed_precision": _precision(trainer.plugins, lines),
        "comm_overlap": _comm_overlap(partial, result),
    }
    result.sections["optimizer"]["min_lr"] = partial.optim.lr_scheduler.min_lr
    if getattr(strategy, "fsdp", None) == "megatron":
        result.sections["dist"]["use_megatron_fsdp"] = True
    if not result.sections["dist"]:
        del result.sections["dist"]
    if getattr(partial, "peft", None):
        result.peft = (class_name(partial.peft), _known("peft", _arguments(partial.peft), lines))
    lines += [f"callback {callback}" for callback in _callbacks(partial) if callback not in REPLACED_CALLBACKS]
    lines += _unhandled(partial)
    return result


def _arguments(config: Any) -> Values:
    return {name: value for name, value in config.__arguments__.items() if isinstance(name, str)}


def _argument(config: Any, name: str) -> Any:
    """Return an argument that the recipe sets explicitly, else None."""
    return config.__arguments__.get(name)


def _known(section: str, values: Mapping[str, Any], not_translated: list[str]) -> Values:
    """Return the fields that the section has and the file can contain; list each of the others in `not_translated`."""
    known: Values = {}
    for name, value in values.items():
        if not facts.has_field(section, name):
            not_translated.append(f"{section}.{name} = {value!r}: Megatron-Bridge has no such field")
        elif not _is_plain(value):
            not_translated.append(f"{section}.{name}: an object of class {type(value).__name__}")
        else:
            known[name] = value
    return known


def _unhandled(partial: run.Partial) -> Iterator[str]:
    """Yield a line for each explicit argument that no function of this file reads."""
    for path, handled in HANDLED.items():
        part = partial
        for name in path.split("."):
            part = getattr(part, name, None)
        for name, value in _arguments(part).items() if hasattr(part, "__arguments__") else ():
            if name not in handled and value is not None:
                yield f"{path}.{name}"


_MISSING = object()


def _model(partial: run.Partial, base: run.Config | None, result: BridgeConfig) -> Values:
    """Return the fields of the model provider: parallelism, execution, and what the recipe or an override changed."""
    config = partial.model.config
    values = _listed_fields(partial, is_pretraining=result.is_pretraining)
    before = _arguments(base.config) if base is not None else {}
    changed = {name: value for name, value in _arguments(config).items() if before.get(name, _MISSING) != value}
    for name in ("fp8", "fp8_recipe"):  # the mixed precision of the recipe sets them
        changed.pop(name, None)
    values |= _known("model", changed, result.not_translated)
    values |= _experts(partial, values)
    if values.get("cuda_graph_impl") == "local":  # Megatron-Bridge supports it only for complete iterations
        values |= {"cuda_graph_impl": "transformer_engine", "use_te_rng_tracker": True}
    if getattr(config, "num_moe_experts", None):
        return values
    return {name: value for name, value in values.items() if not name.startswith("moe_")}


def _listed_fields(partial: run.Partial, *, is_pretraining: bool) -> Values:
    """Return the fields of the tables above, without those that are None or that the provider itself must set."""
    config = partial.model.config
    pretraining_fields: Iterable[str] = PRETRAINING_FIELDS if is_pretraining else ()
    names_of_config = (*EXECUTION_FIELDS, *TRAINING_FIELDS, *pretraining_fields)
    values: Values = {}
    for owner, names in ((partial.trainer.strategy, PARALLEL_FIELDS), (config, names_of_config)):
        for name in names:
            value = getattr(owner, name, None)
            if value is not None or name in WRITTEN_IF_NONE:
                values[name] = value
    if isinstance(values.get("rotary_base"), list | tuple):  # Gemma 3 has one for each kind of layer
        del values["rotary_base"]
    if getattr(values.get("attention_backend"), "name", "") == "auto":
        del values["attention_backend"]
    return values


def _is_plain(value: object) -> bool:
    """Return whether the file can contain the value: a number, text, dtype or enum, or a container of them."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    is_dtype = str(value).startswith("torch.") and type(value).__name__ == "dtype"
    return value is None or is_dtype or isinstance(value, bool | int | float | str | enum.Enum)


def _experts(partial: run.Partial, values: Values) -> Values:
    """Return the fields of the dispatcher, and the tensor parallelism of experts, which is TP by default in NeMo."""
    experts: Values = {}
    if getattr(partial.model.config, "num_moe_experts", None):
        strategy = partial.trainer.strategy
        degree = getattr(strategy, "expert_tensor_parallel_size", None) or strategy.tensor_model_parallel_size
        experts["expert_tensor_parallel_size"] = degree
    if values.pop("moe_enable_deepep", False) or "DeepEPCallback" in _callbacks(partial):
        experts |= {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}
        experts["moe_shared_expert_overlap"] = False
    return experts


def _callbacks(partial: run.Partial) -> dict[str, Any]:
    """Return the callbacks of the recipe by the name of their class."""
    return {class_name(callback): callback for callback in partial.trainer.callbacks or []}


def _train(partial: run.Partial) -> Values:
    values: Values = {
        "train_iters": partial.trainer.max_steps,
        "micro_batch_size": partial.data.micro_batch_size,
        "global_batch_size": partial.data.global_batch_size,
    }
    collection = _callbacks(partial).get("GarbageCollectionCallback")
    if collection:
        values |= {"manual_gc": True, "manual_gc_interval": collection.gc_interval_train}
    return values


def _scheduler(partial: run.Partial, not_translated: list[str]) -> Values:
    schedule = partial.optim.lr_scheduler
    name = class_name(schedule)
    if name != "CosineAnnealingScheduler":
        not_translated.append(f"learning-rate schedule {name}: written as cosine decay")
    if getattr(schedule, "constant_steps", 0):
        not_translated.append(f"constant_steps = {schedule.constant_steps} at the end of the learning-rate schedule")
    return {
        "lr_decay_style": "cosine",
        "lr_decay_iters": _argument(schedule, "max_steps") or partial.trainer.max_steps,
        "lr_warmup_iters": schedule.warmup_steps,
        "start_weight_decay": partial.optim.config.weight_decay,
        "end_weight_decay": partial.optim.config.weight_decay,
        "weight_decay_incr_style": "constant",
    }


def _tokens(partial: run.Partial) -> Values:
    """Return a dataset of tokens: a blend of Megatron's indexed datasets, or random tokens."""
    data = partial.data
    values: Values = {"seq_length": data.seq_length, "random_seed": _argument(data, "seed") or 1234}
    values |= {name: _argument(data, name) or False for name in DATA_FLAGS}
    values["num_workers"] = data.num_workers
    values |= {"dataloader_type": "single", "split": getattr(data, "split", None) or "9999,8,2"}
    paths = getattr(data, "paths", None)
    if isinstance(paths, Mapping):
        parts = [_blend(paths[part]) if part in paths else None for part in ("train", "validation", "test")]
        return values | {"blend_per_split": parts}
    values["blend"] = None if paths is None else _blend(paths)
    if _argument(data, "index_mapping_dir"):
        values["path_to_cache"] = data.index_mapping_dir
    return values


def _samples(partial: run.Partial, not_translated: list[str]) -> Values:
    """Return a dataset of samples for fine-tuning, padded to the sequence length like packed samples in NeMo."""
    data = partial.data
    root = _argument(data, "dataset_root")
    if root is None:
        root = "data"
        not_translated.append("mock data: `dataset_root` must be a folder with training.jsonl and validation.jsonl")
    if _argument(data, "packed_sequence_specs"):
        not_translated.append("packed samples: `enable_offline_packing` and `offline_packing_specs` pack them")
    values: Values = {"dataset_root": str(root), "seq_length": data.seq_length, "dataloader_type": "batch"}
    return values | {"dataset_kwargs": {"pad_to_max_length": True}, "num_workers": _argument(data, "num_workers") or 2}


def _blend(paths: Any) -> tuple[list[str], list[float] | None]:
    """Convert NeMo's blend, [prefix...] or [weight, prefix, ...], to a tuple of prefixes and weights."""
    parts = [str(part) for part in ([paths] if isinstance(paths, str) else paths)]
    try:
        return parts[1::2], [float(part) for part in parts[::2]]
    except ValueError:
        return parts, None


def _tokenizer(partial: run.Partial, result: BridgeConfig) -> Values:
    """Return the tokenizer. In pretraining, it determines the vocabulary where NeMo's model has none, as in NeMo."""
    tokenizer: Any = getattr(partial.data, "tokenizer", None)
    name = class_name(tokenizer)
    values: Values = {}
    if result.is_pretraining and getattr(partial.model.config, "vocab_size", None) is None:
        values["use_tokenizer_vocab_size"] = True
    if name == "NullTokenizer" and result.is_pretraining:
        # NeMo's adds an end-of-document id to this size, Megatron-Bridge's does not.
        return values | {"tokenizer_type": "NullTokenizer", "vocab_size": tokenizer.vocab_size + 1}
    if name == "SentencePieceTokenizer":
        return values | {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": tokenizer.model_path}
    path = getattr(tokenizer, "pretrained_model_name", None)
    if name not in ("", "AutoTokenizer", "NullTokenizer"):
        result.not_translated.append(f"tokenizer {name}: the file uses that of {result.hf_model}")
    return values | {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": path or result.hf_model}


def _checkpoint(partial: run.Partial, name: str, hf_model: str) -> Values:
    strategy, ckpt = partial.trainer.strategy, partial.log.ckpt
    values: Values = {"save": f"checkpoints/{name}", "load": f"checkpoints/{name}"}
    values["save_interval"] = getattr(ckpt, "every_n_train_steps", None)
    keep = getattr(ckpt, "save_top_k", None)
    if isinstance(keep, int) and keep > 0:
        values["most_recent_k"] = keep
    for nemo_name, bridge_name in CHECKPOINT_FIELDS.items():
        value = _argument(strategy, nemo_name)
        if value is not None:
            values[bridge_name] = value
    if getattr(partial.resume, "restore_config", None) is not None:
        values["pretrained_checkpoint"] = pretrained_folder(hf_model)
    return values


def pretrained_folder(hf_model: str) -> str:
    """Return the folder of the converted weights, relative to the one in which the file is started."""
    return f"pretrained/{hf_model.rstrip('/').rpartition('/')[2]}"


def _precision(plugin: Any, not_translated: list[str]) -> Values:
    """Return the fields of MixedPrecisionConfig. Its `bf16`, `fp16` and `fp32` replace NeMo's `precision`."""
    arguments = _arguments(plugin)
    precision = str(arguments.pop("precision", "bf16-mixed"))
    values: Values = {name: precision.startswith(name.removeprefix("fp")) for name in ("bf16", "fp16", "fp32")}
    if arguments.get("fp8"):
        values["fp8_recipe"] = getattr(plugin, "fp8_recipe", None) or "delayed"  # the stacks have other defaults
    renamed = {RENAMED_PRECISION_FIELDS.get(name, name): value for name, value in arguments.items()}
    return values | _known("mixed_precision", renamed, not_translated)


def _comm_overlap(partial: run.Partial, result: BridgeConfig) -> Values:
    values: Values = {"tp_comm_overlap": False}
    callback = _callbacks(partial).get("MegatronCommOverlapCallback")
    if callback is None:
        return values
    arguments = _arguments(callback)
    tuned = arguments.pop("tp_comm_overlap_cfg", None)
    if tuned is not None:
        result.userbuffers = _find_userbuffers(tuned, result.not_translated)
    return values | _known("comm_overlap", arguments, result.not_translated)


def _find_userbuffers(config: Any, not_translated: list[str]) -> str | None:
    name = flatten.find_userbuffers_name(config).rpartition(".")[2]
    if name in facts.stack()["userbuffers"]:
        return name
    not_translated.append(f"userbuffers {name or 'of the recipe'}: Transformer Engine's defaults are used")
    return None
