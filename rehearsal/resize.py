"""A shrunk job written into the recipe it came from, and the recipe made to train for a few steps on made-up text."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from superpod.planner.layout import Layout
from superpod.planner.models import ModelShape
from superpod.rehearsal.convert import Change

CONFIG = {
    "layers": "num_layers",
    "hidden": "hidden_size",
    "ffn": "ffn_hidden_size",
    "heads": "num_attention_heads",
    "groups": "num_query_groups",
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
"""Of the planner's `ModelShape`, the field of NeMo's configurations; one that has not got the field needs no value."""

LR, ADAPTERS_LR = 1e-3, 4e-3
"""Learning rate of a rehearsal: a model of this size learns the made-up text in ten steps, and so do its adapters."""


def resize(partial: Any, job: Any) -> Any:
    """The recipe `partial` with the sizes and degrees of the shrunk `job`; `partial` is left as it is."""
    small = copy.deepcopy(partial)
    _size(small.model.config, job.model, job.seq)
    place(small, job.layout, job.gpus)
    for name in ("mbs", "gbs"):
        setattr(small.data, {"mbs": "micro_batch_size", "gbs": "global_batch_size"}[name], getattr(job.layout, name))
    small.data.seq_length = job.seq
    if job.layout.recompute == "full":
        small.model.config.recompute_num_layers = job.layout.recompute_layers
    return small


def place(partial: Any, layout: Layout, ranks: int) -> None:
    """Lay `partial` out on so many ranks."""
    from superpod.recipes.layout import STAGES, STRATEGY

    strategy = partial.trainer.strategy
    for name, field in (STRATEGY | STAGES).items():
        if getattr(strategy, field, None) != getattr(layout, name):
            setattr(strategy, field, getattr(layout, name))
    if layout.chunks or getattr(strategy, "pipeline_model_parallel_layout", None):
        strategy.pipeline_model_parallel_layout = _rows(layout, partial.model.config.mtp_num_layers or 0)
    partial.trainer.devices, partial.trainer.num_nodes = ranks, 1


def _rows(layout: Layout, mtp: int) -> list[list[str]] | None:
    """The chunks in Megatron's words (transformer/pipeline_parallel_layer_layout.py)."""
    if layout.chunks is None:
        return None
    rows = [["decoder"] * count for count in layout.chunks]
    return [["embedding", *rows[0]], *rows[1:-1], [*rows[-1], *["mtp"] * mtp, "loss"]]


def value_of(config: Any, name: str) -> Any:
    """A field of a configuration, its default included; None where it has no such field."""
    import dataclasses

    import fiddle as fdl

    if name in config.__arguments__:
        return getattr(config, name)
    own = {each.name: each for each in dataclasses.fields(fdl.get_callable(config))}.get(name)
    if own is None or own.default is not dataclasses.MISSING:
        return own and own.default
    return own.default_factory() if own.default_factory is not dataclasses.MISSING else None


def _size(config: Any, model: ModelShape, seq: int) -> None:
    for mine, theirs in CONFIG.items():
        if value_of(config, theirs) or theirs == "vocab_size":
            setattr(config, theirs, getattr(model, mine) or None)
    config.seq_length = seq
    if isinstance(value_of(config, "moe_layer_freq"), list):
        config.moe_layer_freq = [int("moe" in blocks) for blocks in model.blocks]
    if (value_of(config, "moe_router_num_groups") or 1) > 1:
        config.moe_router_num_groups, config.moe_router_group_topk = 2, 1
    window = model.window or seq
    if old := value_of(config, "window_size"):
        config.window_size = window if isinstance(old, int) else type(old)((window, old[1]))  # Gemma 3's is a number
    if value_of(config, "attention_chunk_size"):
        config.attention_chunk_size = window


def train_briefly(partial: Any, steps: int, data: Path, vocab: int, save_every: int) -> list[Change]:
    """Make `partial` learn the text at `data` in so many steps, and save every so many; says what it changed."""
    import nemo_run as run
    from nemo.collections.common.tokenizers.null_tokenizer import NullTokenizer
    from nemo.collections.llm.gpt.data.pre_training import PreTrainingDataModule

    sizes = {name: getattr(partial.data, name) for name in ("seq_length", "micro_batch_size", "global_batch_size")}
    old = {"steps": partial.trainer.max_steps, "lr": partial.optim.config.lr, "data": _name(partial.data)}
    partial.data = run.Config(
        PreTrainingDataModule,
        paths=[str(data)],
        split="1,0,0",
        index_mapping_dir=str(data.parent / "index"),
        num_workers=0,
        tokenizer=run.Config(NullTokenizer, vocab_size=vocab - 1),
        **sizes,
    )
    trainer, schedule = partial.trainer, partial.optim.lr_scheduler
    trainer.max_steps = trainer.val_check_interval = steps
    trainer.log_every_n_steps = 1
    trainer.limit_val_batches = trainer.limit_test_batches = 0
    lr = ADAPTERS_LR if getattr(partial, "peft", None) is not None else LR
    partial.optim.config.lr = schedule.min_lr = lr
    schedule.warmup_steps = schedule.constant_steps = 0
    for name in ("hidden_dropout", "attention_dropout"):
        setattr(partial.model.config, name, 0.0)
    partial.log.tensorboard = None
    saving = partial.log.ckpt
    saving.every_n_train_steps, saving.save_top_k, saving.save_last, saving.filename = save_every, -1, False, "{step}"
    return [
        Change("trainer.max_steps", old["steps"], steps, "a rehearsal is short"),
        Change("optim.config.lr", old["lr"], lr, "without warm-up, so that a few steps show learning"),
        Change("data", old["data"], "PreTrainingDataModule", "made-up text in Megatron's own files: it can be learnt"),
        Change("model.config dropouts", "the recipe's", 0.0, "ranks draw other random numbers in another layout"),
    ]


def in_fp32(partial: Any) -> None:
    """Compute in fp32, where layouts can be compared to the last digits."""
    import nemo_run as run
    import torch
    from nemo.lightning.pytorch.plugins.mixed_precision import MegatronMixedPrecision

    kind = torch.float32
    partial.trainer.plugins = run.Config(
        MegatronMixedPrecision, precision="32", params_dtype=kind, pipeline_dtype=kind, autocast_enabled=False
    )
    partial.trainer.strategy.pipeline_dtype = kind
    partial.optim.config.bf16 = partial.optim.config.fp16 = False


def write_text(prefix: Path, vocab: int, seq: int, samples: int) -> None:
    """Text that is quickly learnt: a sixteenth of the vocabulary, mostly counting up, in Megatron's .bin and .idx."""
    import random

    from superpod.recipes.data.indexed import Writer

    draw, words = random.Random(1234), max(8, vocab // 8)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with Writer(prefix, vocab) as writer:
        for _ in range(16):
            word, document = draw.randrange(words), []
            for _ in range((samples + 2) * seq // 16 + seq):
                word = (word + 1) % words if draw.random() < 0.9 else draw.randrange(words)
                document.append(word)
            writer.add(document)


def weaken_balance(partial: Any, cp: int) -> list[Change]:
    """Have one rank balance its experts as weakly as `cp` context-parallel ranks do in Megatron-Core 0.15.3.

    Each of them adds its share of these losses, and the gradients are averaged over them as over data-parallel ranks
    (schedules.forward_step_calc_loss).
    """
    changes = []
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        if cp > 1 and (old := value_of(partial.model.config, name)):
            setattr(partial.model.config, name, old / cp)
            why = f"with CP {cp}, Megatron-Core 0.15.3 divides this loss by {cp}"
            changes.append(Change(f"model.config.{name} on one rank", old, old / cp, why))
    return changes


def _name(config: Any) -> str:
    import fiddle as fdl

    return fdl.get_callable(config).__name__
