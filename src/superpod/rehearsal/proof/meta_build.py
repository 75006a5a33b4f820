"""Builds the model of any rank at any world size on the meta device, without memory and other ranks."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from superpod.nemo2.validation.reading import class_name
from superpod.planner.layout import PARALLEL_SIZES

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule
    from nemo.collections.llm.gpt.model.base import GPTConfig, GPTModel
    from nemo.lightning import MegatronStrategy
    from nemo_run import Partial

DEFAULT_VOCAB = 128_256
"""Vocabulary size of Llama 3, for a recipe without a tokenizer on this machine, such as NeMo's recipes with mock data.
The parameter counts of other models then differ accordingly."""

# Megatron sets these variables when it builds a model, and then rejects a model with another attention backend.
NVTE = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


def dry_build(
    recipe: Partial, rank: int, world_size: int, *, vocab_size: int | None = None, step: bool = False
) -> list[int]:
    """Build the Megatron model of a rank on the meta device, and return the parameters of each model chunk.

    The recipe's own NeMo configuration and strategy build the model in a fake process group. Megatron's own checks are
    executed, nothing is allocated, and the state of the process is restored.

    Args:
        recipe: a ``run.Partial`` of ``llm.pretrain`` or ``llm.finetune``.
        rank: global rank, 0-based.
        world_size: GPUs of the run, which may differ from the recipe's number of GPUs.
        vocab_size: vocabulary size before padding. Default: ``vocab_size`` of the configuration, else the size of the
            tokenizer if its files are on this machine, else ``DEFAULT_VOCAB``.
        step: also run Megatron's pipeline schedule for a step, with the recipe's batch on ``world_size`` GPUs.

    Returns:
        The number of parameters of each model chunk, including adapters; without virtual stages, one element.

    Raises:
        AssertionError, RuntimeError, ValueError: Megatron or NeMo rejects the layout.
    """
    import fiddle as fdl

    from superpod.rehearsal.comparison import communication
    from superpod.rehearsal.patches.gpu_settings import switch_off_gpu_only
    from superpod.rehearsal.patches.registry import install
    from superpod.rehearsal.proof import pipeline_schedule

    install()
    strategy: Any = fdl.build(recipe.trainer.strategy)
    degrees = get_degrees(strategy)
    with fake_ranks(rank, world_size, **degrees):
        config = connect_model(recipe, strategy, optimizer=False).config
        switch_off_gpu_only(config)  # the precision plugin has just set FP8
        config.use_cpu_initialization = True  # otherwise, Megatron passes a device, which overrides the meta device
        config.perform_initialization = False
        communication.require_groups(degrees)
        if step:
            pipeline_schedule.run(config, strategy.ddp_config, pipeline_schedule.Batch.from_data(recipe.data))
        return [count_parameters(chunk) for chunk in build_chunks(recipe, config, vocab_size=vocab_size)]


def connect_model(recipe: Partial, strategy: MegatronStrategy, *, optimizer: bool = True) -> GPTModel:
    """Build NeMo's model, and connect it to the strategy, which sets layout and precision in the model's configuration.

    Args:
        recipe: a ``run.Partial``.
        strategy: the strategy of the recipe's trainer, already built.
        optimizer: also connect the recipe's optimizer, which requires Transformer Engine for moments below FP32.
    """
    import fiddle as fdl

    model = copy.deepcopy(recipe.model)
    if hasattr(model, "tokenizer"):
        model.tokenizer = None  # building one may download it
    built: Any = fdl.build(model)
    plugins = getattr(recipe.trainer, "plugins", None)
    for plugin in plugins if isinstance(plugins, list) else [plugins]:
        if "Precision" in class_name(plugin):
            strategy.precision_plugin = fdl.build(plugin)
    configured = getattr(recipe, "optim", None)
    if optimizer and configured is not None:
        module: Any = fdl.build(configured)
        module.connect(built)
    strategy.connect(built)
    return built


def build_chunks(
    recipe: Partial, config: GPTConfig, *, vocab_size: int | None = None, default_vocab: int = DEFAULT_VOCAB
) -> Iterator[MegatronModule]:
    """Yield the model chunks of this rank of Megatron's parallel state, with adapters, built on the meta device.

    Args:
        recipe: a ``run.Partial``.
        config: the model configuration after `connect_model`.
        vocab_size: as in `dry_build`.
        default_vocab: vocabulary size, if neither the configuration nor a tokenizer on this machine provides it.
    """
    import fiddle as fdl

    if vocab_size is not None:
        config.vocab_size = None
    tokenizer = SimpleNamespace(vocab_size=vocab_size or get_tokenizer_vocab(recipe) or default_vocab)
    peft = fdl.build(recipe.peft) if getattr(recipe, "peft", None) else None
    for stage in range(config.virtual_pipeline_model_parallel_size or 1):
        yield _build_chunk(config, tokenizer, stage, peft)


def count_parameters(chunk: MegatronModule) -> int:
    """Return the number of parameters of a model chunk."""
    return sum(parameter.numel() for parameter in chunk.parameters())


def _build_chunk(config: GPTConfig, tokenizer: SimpleNamespace, stage: int, peft: Any = None) -> MegatronModule:
    """Build the chunk `stage` (from 0) of this rank on the meta device, with adapters if `peft` is not None."""
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
            chunk.requires_grad_(False)  # NeMo freezes the model before it adds adapters
            walk(chunk, peft.transform)
            share_among_experts(chunk)
    return chunk


@contextlib.contextmanager
def fake_ranks(rank: int, world_size: int, *, te_rng_tracker: bool = False, **layout: Any) -> Iterator[None]:
    """Initialize Megatron's parallel state for one rank of a fake process group within the block.

    Args:
        rank: global rank, 0-based.
        world_size: GPUs of the run.
        te_rng_tracker: use Transformer Engine's RNG states, which support CUDA graphs.
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

    def create_own_group(ranks: list[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Create only the dozen groups to which this rank belongs; the thousands of others would take minutes."""
        if ranks is None or rank in ranks:
            return create_group(ranks, *args, **kwargs)
        return dist.GroupMember.NON_GROUP_MEMBER

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with mock.patch.object(parallel_state, "create_group", create_own_group):
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
        sys.excepthook = excepthook  # every process group wraps it again


def get_degrees(strategy: MegatronStrategy) -> dict[str, Any]:
    """Return the arguments that NeMo passes to initialize_model_parallel (_strategy_lib.init_model_parallel)."""
    names = (*PARALLEL_SIZES.values(), "num_distributed_optimizer_instances")
    return {
        **{name: getattr(strategy, name) for name in names},
        "order": "tp-cp-ep-pp-dp" if strategy.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
    }


def get_tokenizer_vocab(recipe: Partial) -> int | None:
    """Return the vocabulary size of the recipe's tokenizer; None without a tokenizer or its files on this machine."""
    import fiddle as fdl

    for owner in (getattr(recipe, "data", None), recipe.model):
        tokenizer = getattr(owner, "tokenizer", None)
        if isinstance(tokenizer, fdl.Buildable):
            with _disable_network(), contextlib.suppress(Exception):  # tokenizers raise many types if files are missing
                tokenizer = fdl.build(tokenizer)
        size = getattr(tokenizer, "vocab_size", None)
        if isinstance(size, int) and not isinstance(tokenizer, fdl.Buildable):
            return size
    return None


@contextlib.contextmanager
def _disable_network() -> Iterator[None]:
    """Restrict Hugging Face's libraries to their cache within the block; they would retry the network for minutes."""
    from huggingface_hub import constants
    from transformers.utils import hub

    with mock.patch.object(constants, "HF_HUB_OFFLINE", True), mock.patch.object(hub, "_is_offline_mode", True):
        yield
