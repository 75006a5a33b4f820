"""Writes a shrunk job into its recipe, and has that recipe train for a few steps on generated text."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.nemo2.validation.configured_shape import NEMO_FIELDS
from superpod.planner.layout import Layout
from superpod.planner.models import ModelShape
from superpod.planner.planned_job import PlannedJob
from superpod.rehearsal.training.cpu_recipe import Change

if TYPE_CHECKING:
    from nemo_run import Config, Partial

WITHOUT_DROPOUT = "one rank would draw other masks; a run of its own, dropout, keeps it"
LR, ADAPTERS_LR = 1e-3, 4e-3
"""Learning rate of a rehearsal: with it, a model of this size or its adapters learn the text in ten steps."""


def shrunk_recipe(partial: Partial, job: PlannedJob) -> Partial:
    """A copy of the recipe with the sizes and degrees of the shrunk `job`."""
    from superpod.nemo2.build.layout import DATA

    small = copy.deepcopy(partial)
    _set_sizes(small.model.config, job.model, job.seq)
    place(small, job.layout, job.gpus)
    for name, field in DATA.items():
        setattr(small.data, field, getattr(job.layout, name))
    small.data.seq_length = job.seq
    if job.options.optimizer_instances > 1:
        small.trainer.strategy.num_distributed_optimizer_instances = job.options.optimizer_instances
    if job.layout.recompute == "full":
        small.model.config.recompute_num_layers = job.layout.recompute_layers
    return small


def place(partial: Partial, layout: Layout, ranks: int) -> None:
    """Lay `partial` out on so many ranks."""
    from superpod.nemo2.build.layout import STAGES, STRATEGY

    strategy = partial.trainer.strategy
    for name, field in (STRATEGY | STAGES).items():
        if getattr(strategy, field, None) != getattr(layout, name):
            setattr(strategy, field, getattr(layout, name))
    if layout.chunks or getattr(strategy, "pipeline_model_parallel_layout", None):
        strategy.pipeline_model_parallel_layout = _chunk_layers(layout, partial.model.config.mtp_num_layers or 0)
    partial.trainer.devices, partial.trainer.num_nodes = ranks, 1


def without_fsdp(partial: Partial) -> None:
    """Have Megatron's distributed optimizer train `partial` in place of Megatron-FSDP."""
    strategy = partial.trainer.strategy
    strategy.fsdp, strategy.ddp.use_megatron_fsdp = None, False
    strategy.save_ckpt_format = "torch_dist"


def _chunk_layers(layout: Layout, mtp: int) -> list[list[str]] | None:
    """The layers of each chunk as Megatron writes them (transformer/pipeline_parallel_layer_layout.py)."""
    if layout.chunks is None:
        return None
    chunks = [["decoder"] * count for count in layout.chunks]
    return [["embedding", *chunks[0]], *chunks[1:-1], [*chunks[-1], *["mtp"] * mtp, "loss"]]


def value_of(config: Config, name: str) -> Any:
    """A field of a configuration, or its default; None if there is no such field."""
    import fiddle as fdl

    if name in config.__arguments__:
        return getattr(config, name)
    fields: dict[str, dataclasses.Field[Any]] = getattr(fdl.get_callable(config), "__dataclass_fields__", {})
    field = fields.get(name)
    if field is None or field.default is not dataclasses.MISSING:
        return field and field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def _set_sizes(config: Config, model: ModelShape, seq: int) -> None:
    for size, field in NEMO_FIELDS.items():
        if value_of(config, field) or field == "vocab_size":
            setattr(config, field, getattr(model, size) or None)
    config.seq_length = seq
    if isinstance(value_of(config, "moe_layer_freq"), list):
        config.moe_layer_freq = [int("moe" in blocks) for blocks in model.blocks]
    if (value_of(config, "moe_router_num_groups") or 1) > 1:
        config.moe_router_num_groups, config.moe_router_group_topk = 2, 1
    window = model.window or seq
    if old := value_of(config, "window_size"):
        config.window_size = (
            window if isinstance(old, int) else type(old)((window, old[1]))
        )  # Gemma 3 has a number here
    if value_of(config, "attention_chunk_size"):
        config.attention_chunk_size = window


def train_briefly(partial: Partial, steps: int, data: Path, vocab: int, save_every: int) -> list[Change]:
    """Have `partial` learn the text at `data` in so many steps and save every so many; returns what changed."""
    config, schedule = partial.optim.config, partial.optim.lr_scheduler
    old_steps, old_lr, old_data = partial.trainer.max_steps, config.lr, _class_name(partial.data)
    partial.data = _text_data(partial.data, data, vocab)
    _short_training(partial.trainer, steps)
    lr = ADAPTERS_LR if getattr(partial, "peft", None) is not None else LR
    config.lr = schedule.min_lr = lr
    schedule.warmup_steps = schedule.constant_steps = 0
    kept = dropouts(partial)
    set_dropouts(partial, dict.fromkeys(kept, 0.0))
    partial.log.tensorboard = None
    saving = partial.log.ckpt
    saving.every_n_train_steps, saving.save_top_k, saving.save_last, saving.filename = save_every, -1, False, "{step}"
    saving.every_n_epochs = saving.train_time_interval = None  # NeMo's recipes save by the clock
    saving.monitor, saving.mode = "step", "max"  # a rehearsal does not validate, and saves nothing by val_loss
    if "tokenizer" in partial.__arguments__ or getattr(partial, "tokenizer", None) == "model":
        partial.tokenizer = "data"  # that of the generated text
    return [
        Change("trainer.max_steps", old_steps, steps, "a rehearsal is short"),
        Change("optim.config.lr", old_lr, lr, "without warm-up, so that a few steps show learning"),
        Change("data", old_data, "PreTrainingDataModule", "generated text in Megatron's own files: it can be learnt"),
        *(Change(path, share, 0.0, WITHOUT_DROPOUT) for path, share in kept.items()),
    ]


def dropouts(partial: Partial) -> dict[str, float]:
    """{path: share} of the dropouts that a configuration has; {} = none."""
    parts = {"model.config": partial.model.config, "peft": getattr(partial, "peft", None)}
    shares = {
        f"{part}.{name}": value_of(config, name)
        for part, config in parts.items()
        for name in ("hidden_dropout", "attention_dropout", "dropout")
        if config is not None
    }
    return {path: float(share) for path, share in shares.items() if share}


def set_dropouts(partial: Partial, shares: dict[str, float]) -> None:
    """Set dropouts by path."""
    for path, share in shares.items():
        config = partial.peft if path.startswith("peft.") else partial.model.config
        setattr(config, path.rpartition(".")[2], share)


def _text_data(data: Config, prefix: Path, vocab: int) -> Config:
    """NeMo's data module for the text at `prefix`, with the sizes of the recipe's own."""
    import nemo_run as run
    from nemo.collections.common.tokenizers.null_tokenizer import NullTokenizer
    from nemo.collections.llm.gpt.data.pre_training import PreTrainingDataModule

    return run.Config(
        PreTrainingDataModule,
        paths=[str(prefix)],
        split="1,0,0",
        index_mapping_dir=str(prefix.parent / "index"),
        num_workers=0,
        tokenizer=run.Config(NullTokenizer, vocab_size=vocab - 1),  # NeMo adds one for the end of a document
        seq_length=data.seq_length,
        micro_batch_size=data.micro_batch_size,
        global_batch_size=data.global_batch_size,
    )


def _short_training(trainer: Config, steps: int) -> None:
    trainer.max_steps = trainer.val_check_interval = steps
    trainer.log_every_n_steps = 1
    trainer.limit_val_batches = trainer.limit_test_batches = 0


def in_fp32(partial: Partial) -> None:
    """Compute in fp32, in which the losses of two layouts agree to the last digits."""
    import nemo_run as run
    import torch
    from nemo.lightning.pytorch.plugins.mixed_precision import MegatronMixedPrecision

    kind = torch.float32
    partial.trainer.plugins = run.Config(
        MegatronMixedPrecision, precision="32", params_dtype=kind, pipeline_dtype=kind, autocast_enabled=False
    )
    partial.trainer.strategy.pipeline_dtype = kind
    config = partial.optim.config
    config.bf16 = config.fp16 = False
    config.use_precision_aware_optimizer = False
    config.exp_avg_dtype = config.exp_avg_sq_dtype = kind
    if config.optimizer_cpu_offload:  # Megatron offloads no shards of FP32 parameters: nemo2/validation/sharded.py
        config.optimizer_cpu_offload = False


def write_text(prefix: Path, vocab: int, seq: int, samples: int) -> None:
    """Write text that is learnt quickly, an eighth of the vocabulary mostly counting up, in Megatron's format."""
    import random

    from superpod.data.tokens.indexed import Writer

    draw, words = random.Random(1234), max(8, vocab // 8)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with Writer(prefix, vocab) as writer:
        for _ in range(16):
            word, document = draw.randrange(words), []
            for _ in range((samples + 2) * seq // 16 + seq):
                word = (word + 1) % words if draw.random() < 0.9 else draw.randrange(words)
                document.append(word)
            writer.add(document)


def weaken_balance(partial: Partial, cp: int) -> list[Change]:
    """Have one rank balance its experts as weakly as `cp` context-parallel ranks do in Megatron-Core 0.15.3.

    There each of these ranks adds its share of the balancing losses, and then the gradients are averaged over them as
    over data-parallel ranks (pipeline_parallel/schedules.py, forward_step_calc_loss).
    """
    changes = []
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        if cp > 1 and (old := value_of(partial.model.config, name)):
            setattr(partial.model.config, name, old / cp)
            reason = f"with CP {cp}, Megatron-Core 0.15.3 divides this loss by {cp}"
            changes.append(Change(f"model.config.{name} on one rank", old, old / cp, reason))
    return changes


def _class_name(config: Config) -> str:
    import fiddle as fdl

    return fdl.get_callable(config).__name__
