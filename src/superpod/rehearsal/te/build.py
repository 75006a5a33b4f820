"""Builds the NeMo model of a rank with Transformer Engine's layers, on the meta device, for a GPU generation."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from superpod.nemo2.validation.reading import class_name
from superpod.rehearsal.comparison import communication
from superpod.rehearsal.proof import meta_build, pipeline_schedule
from superpod.rehearsal.te import cuda, device, import_te, recording, step, variables

if TYPE_CHECKING:
    from nemo_run import Partial

CALLBACKS = ("MegatronCommOverlapCallback", "DeepEPCallback")
"""Callbacks that change the configuration of the model before it is built."""


@dataclass(frozen=True)
class TeBuild:
    """The result of building the model of a rank with Transformer Engine."""

    parameters: list[int]
    """Number of parameters of each virtual stage, including adapters."""
    layers: frozenset[str]
    """Digests of the distinct layers: class, constructor arguments, GPU generation and FP8 recipe."""
    attention: frozenset[str] = frozenset()
    """Attention backends that Transformer Engine selected: flash, fused, or unfused, which stores all scores."""
    tensors: str = ""
    """Digest of the names, shapes and types of all parameters."""
    communication: frozenset[str] = frozenset()
    """Sizes of the process groups, and the operations that the step executed over them."""


def build_with_te(
    partial: Partial,
    rank: int,
    world_size: int,
    generation: str,
    environment: Mapping[str, str] | None = None,
    *,
    vocabulary: int | None = None,
    packed: bool = False,
) -> TeBuild:
    """Build the model of a rank on the meta device with Transformer Engine and the recipe's own GPU settings.

    Then run a micro-batch forward and backward through each distinct layer; tensors have shapes but no values.

    Args:
        partial: a `run.Partial` of `llm.pretrain` or `llm.finetune`.
        rank: global rank, 0-based.
        world_size: GPUs of the run.
        generation: compute capability of the GPUs: sm80, sm90, sm100 or sm103.
        environment: environment variables of the ranks (`collection.facts.environment.variables`); TE reads some.
        vocabulary: vocabulary size, if neither the recipe nor a tokenizer on this machine provides it.
        packed: whether the micro-batch is one packed sequence of several samples, as in fine-tuning.

    Raises:
        AssertionError, RuntimeError, ValueError: Transformer Engine, Megatron or NeMo rejects the recipe.
        NotParallelError: the libraries use a parallel size that differs from the layout.
        UserError: the generation is unknown.
    """
    if packed:
        partial = _pack_micro_batches(partial)
    with connect(partial, rank, world_size, generation, environment) as (strategy, module, callbacks):
        with recording.record_layers(f"{generation} {_describe_fp8(module.config)}") as layers:
            default = vocabulary or meta_build.DEFAULT_VOCAB
            chunks = list(meta_build.build_chunks(partial, module.config, default_vocab=default))
        counts = [meta_build.count_parameters(chunk) for chunk in chunks]
        tensors = recording.hash_parameters(chunks)
        groups = communication.require_groups(meta_build.get_degrees(strategy))
        for callback in callbacks:
            _create_userbuffers(callback, partial, strategy, module)
        batch = pipeline_schedule.Batch.from_data(partial.data)
        schedule = pipeline_schedule.run(module.config, strategy.ddp_config, batch)
        steps = [step.run(chunk, module.config, batch.micro, packed=packed) for chunk in chunks]
        return TeBuild(
            parameters=counts,
            layers=frozenset(layers),
            attention=frozenset[str]().union(*(one.attention for one in steps)),
            tensors=tensors,
            communication=frozenset(groups | schedule).union(*(one.communication for one in steps)),
        )


@contextlib.contextmanager
def connect(
    partial: Partial, rank: int, world_size: int, generation: str, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[Any, Any, list[Any]]]:
    """Yield the recipe's strategy, NeMo's module before its model is built, and the callbacks that configured it.

    Within the block, this process simulates the rank and its GPU. Arguments and exceptions are those of
    `build_with_te`.
    """
    import fiddle as fdl

    import_te.install()
    cuda.disable_generators()
    with variables.unset_run_variables(), device.generation(generation), cuda.use_meta_device(), _suppress_output():
        strategy: Any = fdl.build(partial.trainer.strategy)
        degrees = meta_build.get_degrees(strategy)
        with (
            meta_build.fake_ranks(rank, world_size, te_rng_tracker=strategy.use_te_rng_tracker, **degrees),
            _app_state(strategy, world_size),
            mock.patch.dict(os.environ, environment or {}),
        ):
            module = meta_build.connect_model(partial, strategy)
            yield strategy, module, _set_up_callbacks(partial, strategy, module)


def _pack_micro_batches(partial: Partial) -> Partial:
    """Return the recipe with each micro-batch packed into one sequence, as in `recipes finetune`."""
    packed = copy.deepcopy(partial)
    data, mbs = packed.data, packed.data.micro_batch_size
    data.micro_batch_size, data.seq_length = 1, data.seq_length * mbs
    data.global_batch_size //= mbs
    packed.model.config.seq_length = data.seq_length
    packed.model.config.calculate_per_token_loss = True
    return packed


def _describe_fp8(config: Any) -> str:
    names = ("fp8", "fp8_recipe", "fp8_param", "first_last_layers_bf16")
    return " ".join(f"{name}={getattr(config, name, None)}" for name in names)


def _set_up_callbacks(partial: Partial, strategy: Any, module: Any) -> list[Any]:
    """Build the recipe's callbacks in `CALLBACKS`, call their `setup`, and return them."""
    import fiddle as fdl

    trainer = SimpleNamespace(strategy=strategy, model=module)
    callbacks: list[Any] = []
    for configured in getattr(partial.trainer, "callbacks", None) or []:
        if isinstance(configured, fdl.Buildable) and class_name(configured) in CALLBACKS:
            callback: Any = fdl.build(configured)
            callback.setup(trainer, module, "fit")
            callbacks.append(callback)
    return callbacks


def _create_userbuffers(callback: Any, partial: Partial, strategy: Any, module: Any) -> None:
    """Create Transformer Engine's userbuffers if the callback creates them at the start of training."""
    if not getattr(callback, "need_tp_overlap_ub_init", False):
        return
    import torch.distributed as dist
    from megatron.core import parallel_state
    from nemo.lightning.pytorch.callbacks import megatron_comm_overlap

    group = parallel_state.get_tensor_model_parallel_group()
    with (
        mock.patch.object(dist, "new_group", return_value=dist.group.WORLD),
        mock.patch.object(dist, "new_subgroups_by_enumeration", return_value=(group, [group])),
        mock.patch.object(megatron_comm_overlap, "get_micro_batch_size", return_value=partial.data.micro_batch_size),
        contextlib.redirect_stdout(None),
    ):
        callback.on_fit_start(SimpleNamespace(strategy=strategy, model=module), module)


@contextlib.contextmanager
def _app_state(strategy: Any, world_size: int) -> Iterator[None]:
    """Set the layout in NeMo's AppState within the block, as the strategy does when it sets up the ranks."""
    from megatron.core import parallel_state
    from nemo.utils import AppState

    state = AppState()
    with mock.patch.dict(vars(state)):
        state.world_size = world_size
        state.data_parallel_size = parallel_state.get_data_parallel_world_size()
        state.tensor_model_parallel_size = strategy.tensor_model_parallel_size
        state.context_parallel_size = strategy.context_parallel_size
        yield


@contextlib.contextmanager
def _suppress_output() -> Iterator[None]:
    """Suppress warnings and log messages within the block."""
    old_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        # Transformer Engine sets the level of a logger in each attention layer, which clears the caches of all loggers.
        with warnings.catch_warnings(), mock.patch.object(logging.Manager, "_clear_cache"):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(old_level)
