"""Applies a shrunk job to its recipe, and configures the recipe for a few training steps on generated text."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.nemo2.validation.configured_shape import NEMO_FIELDS
from superpod.nemo2.validation.reading import class_name
from superpod.planner.layout import Layout
from superpod.planner.models import ModelShape
from superpod.planner.planned_job import PlannedJob
from superpod.rehearsal.training.cpu_recipe import Change

if TYPE_CHECKING:
    from nemo_run import Config, Partial

WITHOUT_DROPOUT = "one rank would draw different masks; only the run `dropout` keeps it"
LR, ADAPTERS_LR = 1e-3, 4e-3
"""Learning rates with which a model of a rehearsal's size, or its adapters, learns the text in ten steps."""


def build_shrunk_recipe(partial: Partial, job: PlannedJob) -> Partial:
    """Return a copy of the recipe with the sizes and degrees of the shrunk `job`."""
    from superpod.nemo2.build.layout import DATA

    shrunk = copy.deepcopy(partial)
    _set_sizes(shrunk.model.config, job.model, job.seq)
    set_layout(shrunk, job.layout, job.gpus)
    for name, field in DATA.items():
        setattr(shrunk.data, field, getattr(job.layout, name))
    shrunk.data.seq_length = job.seq
    if job.options.optimizer_instances > 1:
        shrunk.trainer.strategy.num_distributed_optimizer_instances = job.options.optimizer_instances
    if job.layout.recompute == "full":
        shrunk.model.config.recompute_num_layers = job.layout.recompute_layers
    return shrunk


def set_layout(partial: Partial, layout: Layout, ranks: int) -> None:
    """Set the layout of a recipe, and its number of ranks on one node."""
    from superpod.nemo2.build.layout import STAGES, STRATEGY

    strategy = partial.trainer.strategy
    for name, field in (STRATEGY | STAGES).items():
        if getattr(strategy, field, None) != getattr(layout, name):
            setattr(strategy, field, getattr(layout, name))
    if layout.chunks or getattr(strategy, "pipeline_model_parallel_layout", None):
        strategy.pipeline_model_parallel_layout = _chunk_layers(layout, partial.model.config.mtp_num_layers or 0)
    partial.trainer.devices, partial.trainer.num_nodes = ranks, 1


def disable_fsdp(partial: Partial) -> None:
    """Use Megatron's distributed optimizer instead of Megatron-FSDP."""
    strategy = partial.trainer.strategy
    strategy.fsdp, strategy.ddp.use_megatron_fsdp = None, False
    strategy.save_ckpt_format = "torch_dist"


def _chunk_layers(layout: Layout, mtp: int) -> list[list[str]] | None:
    """Return the layers of each chunk, including `mtp` multi-token prediction layers, or None without chunks."""
    # The format of megatron/core/transformer/pipeline_parallel_layer_layout.py.
    if layout.chunks is None:
        return None
    chunks = [["decoder"] * count for count in layout.chunks]
    return [["embedding", *chunks[0]], *chunks[1:-1], [*chunks[-1], *["mtp"] * mtp, "loss"]]


def _get_field(config: Config, name: str) -> Any:
    """Return the value of a configuration's field, or the default of its class; None if there is no such field."""
    import fiddle as fdl

    if name in config.__arguments__:
        return getattr(config, name)
    fields: dict[str, dataclasses.Field[Any]] = getattr(fdl.get_callable(config), "__dataclass_fields__", {})
    field = fields.get(name)
    if field is None:
        return None
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None


def _set_sizes(config: Config, model: ModelShape, seq: int) -> None:
    """Set the sizes of a model configuration to those of `model`, and its sequence length to `seq`."""
    for size, field in NEMO_FIELDS.items():
        if _get_field(config, field) or field == "vocab_size":
            setattr(config, field, getattr(model, size) or None)
    config.seq_length = seq
    if isinstance(_get_field(config, "moe_layer_freq"), list):
        config.moe_layer_freq = [int("moe" in blocks) for blocks in model.blocks]
    if (_get_field(config, "moe_router_num_groups") or 1) > 1:
        config.moe_router_num_groups, config.moe_router_group_topk = 2, 1

    window = model.window or seq
    old_window = _get_field(config, "window_size")
    if isinstance(old_window, int) and old_window:  # Gemma 3
        config.window_size = window
    elif old_window:
        config.window_size = type(old_window)((window, old_window[1]))
    if _get_field(config, "attention_chunk_size"):
        config.attention_chunk_size = window


def set_short_training(partial: Partial, steps: int, text: Path, vocab: int, save_every: int) -> list[Change]:
    """Configure a recipe to train on generated text for a few steps without dropout.

    Args:
        partial: the shrunk recipe, which is modified.
        steps: training steps.
        text: path prefix of the token files (`write_text`).
        vocab: vocabulary size.
        save_every: steps between two checkpoints.

    Returns:
        The changed settings.
    """
    config, schedule = partial.optim.config, partial.optim.lr_scheduler
    trainer = partial.trainer
    lr = ADAPTERS_LR if getattr(partial, "peft", None) is not None else LR
    dropouts = find_dropouts(partial)
    changes = [
        Change("trainer.max_steps", trainer.max_steps, steps, "a rehearsal has few steps"),
        Change("optim.config.lr", config.lr, lr, "without warm-up, so that the loss decreases in a few steps"),
        Change("data", class_name(partial.data), "PreTrainingDataModule", "generated text that is learned quickly"),
        *(Change(path, probability, 0.0, WITHOUT_DROPOUT) for path, probability in dropouts.items()),
    ]

    partial.data = _build_data_module(partial.data, text, vocab)
    if "tokenizer" in partial.__arguments__ or getattr(partial, "tokenizer", None) == "model":
        partial.tokenizer = "data"
    trainer.max_steps = trainer.val_check_interval = steps
    trainer.log_every_n_steps = 1
    trainer.limit_val_batches = trainer.limit_test_batches = 0
    config.lr = schedule.min_lr = lr
    schedule.warmup_steps = schedule.constant_steps = 0
    set_dropouts(partial, dict.fromkeys(dropouts, 0.0))

    partial.log.tensorboard = None
    saving = partial.log.ckpt
    saving.every_n_train_steps, saving.save_top_k, saving.save_last, saving.filename = save_every, -1, False, "{step}"
    saving.every_n_epochs = saving.train_time_interval = None  # NeMo's recipes save at time intervals
    saving.monitor, saving.mode = "step", "max"  # a rehearsal does not validate, so there is no val_loss
    return changes


def find_dropouts(partial: Partial) -> dict[str, float]:
    """Return {path: probability} of all dropouts above 0 in a recipe."""
    dropouts = {}
    for part, config in (("model.config", partial.model.config), ("peft", getattr(partial, "peft", None))):
        if config is None:
            continue
        for name in ("hidden_dropout", "attention_dropout", "dropout"):
            probability = _get_field(config, name)
            if probability:
                dropouts[f"{part}.{name}"] = float(probability)
    return dropouts


def set_dropouts(partial: Partial, dropouts: dict[str, float]) -> None:
    """Set the dropouts of a recipe; `dropouts` is {path: probability}, as returned by `find_dropouts`."""
    for path, probability in dropouts.items():
        config = partial.peft if path.startswith("peft.") else partial.model.config
        setattr(config, path.rpartition(".")[2], probability)


def _build_data_module(data: Config, prefix: Path, vocab: int) -> Config:
    """Return NeMo's data module for the text at `prefix`, with the sizes of the recipe's own data module."""
    import nemo_run as run
    from nemo.collections.common.tokenizers.null_tokenizer import NullTokenizer
    from nemo.collections.llm.gpt.data.pre_training import PreTrainingDataModule

    return run.Config(
        PreTrainingDataModule,
        paths=[str(prefix)],
        split="1,0,0",
        index_mapping_dir=str(prefix.parent / "index"),
        num_workers=0,
        tokenizer=run.Config(NullTokenizer, vocab_size=vocab - 1),  # NeMo adds the end-of-document token
        seq_length=data.seq_length,
        micro_batch_size=data.micro_batch_size,
        global_batch_size=data.global_batch_size,
    )


def set_fp32(partial: Partial) -> None:
    """Set the precision to FP32, in which the losses of two layouts are equal up to rounding."""
    import nemo_run as run
    import torch
    from nemo.lightning.pytorch.plugins.mixed_precision import MegatronMixedPrecision

    dtype = torch.float32
    partial.trainer.plugins = run.Config(
        MegatronMixedPrecision, precision="32", params_dtype=dtype, pipeline_dtype=dtype, autocast_enabled=False
    )
    partial.trainer.strategy.pipeline_dtype = dtype
    config = partial.optim.config
    config.bf16 = config.fp16 = False
    config.use_precision_aware_optimizer = False
    config.exp_avg_dtype = config.exp_avg_sq_dtype = dtype
    if config.optimizer_cpu_offload:  # Megatron cannot offload shards of FP32 parameters: nemo2/validation/sharded.py
        config.optimizer_cpu_offload = False


def write_text(prefix: Path, vocab: int, seq: int, samples: int) -> None:
    """Write token files with text that a model learns quickly: mostly ascending tokens from 1/8 of the vocabulary.

    Args:
        prefix: path of the .bin and .idx files without the suffix.
        vocab: vocabulary size.
        seq: tokens per sample.
        samples: minimum number of samples.
    """
    import random

    from superpod.data.tokens.indexed import Writer

    draw, used_tokens = random.Random(1234), max(8, vocab // 8)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with Writer(prefix, vocab) as writer:
        for _ in range(16):
            token, document = draw.randrange(used_tokens), []
            for _ in range((samples + 2) * seq // 16 + seq):
                token = (token + 1) % used_tokens if draw.random() < 0.9 else draw.randrange(used_tokens)
                document.append(token)
            writer.add(document)


def scale_balancing_losses(partial: Partial, cp: int) -> list[Change]:
    """Divide the coefficients of MoE balancing losses by `cp`, and return the changes.

    One rank then trains like `cp` ranks: in Megatron-Core 0.15.3, each context-parallel rank adds its share of these
    losses, and gradients are averaged over these ranks (pipeline_parallel/schedules.py, forward_step_calc_loss).
    """
    changes = []
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        old_value = _get_field(partial.model.config, name)
        if cp > 1 and old_value:
            setattr(partial.model.config, name, old_value / cp)
            reason = f"with CP {cp}, Megatron-Core 0.15.3 divides this loss by {cp}"
            changes.append(Change(f"model.config.{name} on one rank", old_value, old_value / cp, reason))
    return changes
