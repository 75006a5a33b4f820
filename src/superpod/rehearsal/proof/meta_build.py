"""Builds the real model of any rank at any world size on the meta device: no memory, no other ranks."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from superpod.planner.layout import PARALLEL_SIZES

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule
    from nemo.collections.llm.gpt.model.base import GPTConfig, GPTModel
    from nemo.lightning import MegatronStrategy
    from nemo_run import Partial

# Llama 3's vocabulary, for a recipe without one that this machine can find: NeMo's stock recipes leave it to a
# tokenizer, and with mock data have none. The counts of other models are then off by the difference.
STAND_IN_VOCAB = 128_256

# Megatron sets these as it builds a model, and refuses another attention backend afterwards (ModelParallelConfig).
NVTE = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def dry_build(
    recipe: Partial, rank: int, world_size: int, *, vocab_size: int | None = None, step: bool = False
) -> list[int]:
    """Parameters of each model chunk that ``rank`` of ``world_size`` holds, from the recipe's real Megatron model.

    The recipe's own NeMo configuration and strategy build the model on the meta device, inside a fake process
    group: Megatron's own checks run, nothing is allocated, and the process is left as before.

    Args:
        recipe: a ``run.Partial`` of ``llm.pretrain`` or ``llm.finetune``.
        rank: global rank, 0-based.
        world_size: GPUs of the run; the recipe's trainer may have another number.
        vocab_size: vocabulary before padding. If None: as in NeMo, the configuration's ``vocab_size``, else
            the tokenizer's if its files are on this machine, else ``STAND_IN_VOCAB``.
        step: run Megatron's schedule of a step too, at the recipe's batch on ``world_size`` GPUs.

    Returns:
        One count per virtual pipeline stage (one element without virtual stages), in order; adapters included.

    Raises:
        AssertionError, RuntimeError, ValueError: Megatron or NeMo refuses the layout.
    """
    import fiddle as fdl

    from superpod.rehearsal.comparison import communication
    from superpod.rehearsal.patches.registry import install
    from superpod.rehearsal.proof import schedule

    install()
    strategy: Any = fdl.build(recipe.trainer.strategy)
    with fake_ranks(rank, world_size, **degrees(strategy)):
        config = connected_config(recipe, strategy)
        communication.require_groups(degrees(strategy))
        if step:
            schedule.run(config, strategy.ddp_config, schedule.Batch.from_data(recipe.data))
        return [parameters(chunk) for chunk in chunks(recipe, config, vocab_size=vocab_size)]


def connected_config(recipe: Partial, strategy: MegatronStrategy) -> GPTConfig:
    """`connected_model`'s configuration, with what needs a GPU switched off."""
    from superpod.rehearsal.patches.gpu_settings import switch_off_gpu_only

    config = connected_model(recipe, strategy, optimizer=False).config
    switch_off_gpu_only(config)  # the precision plugin has just written FP8
    config.use_cpu_initialization = True  # otherwise Megatron names a device, which overrides the meta device
    config.perform_initialization = False
    return config


def connected_model(recipe: Partial, strategy: MegatronStrategy, *, optimizer: bool = True) -> GPTModel:
    """NeMo's module after its strategy has written layout and precision into its configuration, as a run starts.

    `optimizer`: whether the recipe's is connected too, which for moments below FP32 asks for Transformer Engine.
    """
    import fiddle as fdl

    model = copy.deepcopy(recipe.model)
    if hasattr(model, "tokenizer"):
        model.tokenizer = None  # building one may download it
    built: Any = fdl.build(model)
    plugins = getattr(recipe.trainer, "plugins", None)
    for plugin in plugins if isinstance(plugins, list) else [plugins]:
        if plugin is not None and "Precision" in fdl.get_callable(plugin).__name__:
            strategy.precision_plugin = fdl.build(plugin)
    if optimizer and (configured := getattr(recipe, "optim", None)) is not None:
        module: Any = fdl.build(configured)
        module.connect(built)
    strategy.connect(built)
    return built


def chunks(
    recipe: Partial, config: GPTConfig, *, vocab_size: int | None = None, stand_in: int | None = None
) -> Iterator[MegatronModule]:
    """The virtual stages that this rank holds, in order, with the recipe's adapters; on the meta device.

    Args:
        recipe: a ``run.Partial``.
        config: the model's, connected.
        vocab_size: as `dry_build`'s.
        stand_in: vocabulary where neither the configuration nor a tokenizer on this machine names one.
    """
    import fiddle as fdl

    if vocab_size is not None:
        config.vocab_size = None
    tokenizer = SimpleNamespace(vocab_size=vocab_size or tokenizer_vocab(recipe) or stand_in or STAND_IN_VOCAB)
    peft = fdl.build(recipe.peft) if getattr(recipe, "peft", None) else None
    for stage in range(config.virtual_pipeline_model_parallel_size or 1):
        yield _chunk(config, tokenizer, stage, peft)


def parameters(chunk: MegatronModule) -> int:
    """Their number."""
    return sum(parameter.numel() for parameter in chunk.parameters())


def _chunk(config: GPTConfig, tokenizer: SimpleNamespace, stage: int, peft: Any = None) -> MegatronModule:
    import torch
    from megatron.core import parallel_state
    from nemo.collections.llm.fn import walk

    from superpod.rehearsal.patches.adapters import share_among_experts

    virtual = config.virtual_pipeline_model_parallel_size
    if virtual:
        parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
    with torch.device("meta"):
        chunk = config.configure_model(tokenizer, vp_stage=stage if virtual else None)
        if peft is not None:
            chunk.requires_grad_(False)  # as NeMo freezes the model before it adds adapters
            walk(chunk, peft.transform)
            share_among_experts(chunk)
    return chunk


@contextlib.contextmanager
def fake_ranks(rank: int, world_size: int, *, te_rng_tracker: bool = False, **layout: Any) -> Iterator[None]:
    """Megatron's parallel state as ``rank`` sees it, with a process group that sends nothing; undone at the end.

    Args:
        rank: global rank, 0-based.
        world_size: GPUs of the run.
        te_rng_tracker: random states are Transformer Engine's, which CUDA graphs can hold.
        layout: arguments of Megatron's initialize_model_parallel.
    """
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    random_state, environment, excepthook = torch.get_rng_state(), dict(os.environ), sys.excepthook
    for name in NVTE:
        os.environ.pop(name, None)
    create_group = parallel_state.create_group

    def own_group(ranks: list[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Make only the dozen groups that this rank belongs to, of thousands: the others cost minutes."""
        member = ranks is None or rank in ranks
        return create_group(ranks, *args, **kwargs) if member else dist.GroupMember.NON_GROUP_MEMBER

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with mock.patch.object(parallel_state, "create_group", own_group):
            parallel_state.initialize_model_parallel(**layout, create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(1234, te_rng_tracker, force_reset_rng=True)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        initialize_rng_tracker(force_reset=True)
        torch.set_rng_state(random_state)
        os.environ.clear()
        os.environ.update(environment)
        sys.excepthook = excepthook  # each process group wraps it: a thousand builds, a thousand names of ranks


def degrees(strategy: MegatronStrategy) -> dict[str, Any]:
    """The arguments that NeMo gives to initialize_model_parallel (nemo.lightning._strategy_lib.init_model_parallel)."""
    names = (*PARALLEL_SIZES.values(), "num_distributed_optimizer_instances")
    return {
        **{name: getattr(strategy, name) for name in names},
        "order": "tp-cp-ep-pp-dp" if strategy.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
    }


def tokenizer_vocab(recipe: Partial) -> int | None:
    """The vocabulary of the recipe's tokenizer; None if it has no tokenizer, or one that must be downloaded first."""
    import fiddle as fdl

    for owner in (getattr(recipe, "data", None), recipe.model):
        tokenizer = getattr(owner, "tokenizer", None)
        if isinstance(tokenizer, fdl.Buildable):
            with _offline(), contextlib.suppress(Exception):  # whatever a tokenizer raises when its files are missing
                tokenizer = fdl.build(tokenizer)
        if isinstance(size := getattr(tokenizer, "vocab_size", None), int) and not isinstance(tokenizer, fdl.Buildable):
            return size
    return None


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Have Hugging Face's libraries read only their cache, instead of retrying the network for minutes."""
    from huggingface_hub import constants
    from transformers.utils import hub

    before = constants.HF_HUB_OFFLINE, hub._is_offline_mode
    constants.HF_HUB_OFFLINE = hub._is_offline_mode = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, hub._is_offline_mode = before
