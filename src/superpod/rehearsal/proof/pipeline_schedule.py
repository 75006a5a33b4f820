"""Runs Megatron's pipeline schedule with empty model chunks, to detect its errors before step 1.

`get_forward_backward_func` of megatron-core 0.15.3 (pipeline_parallel/schedules.py) returns one of three functions. No
constructor performs their checks, for example of `microbatch_group_size_per_vp_stage` and the number of micro-batches.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

from superpod.rehearsal.comparison import communication

if TYPE_CHECKING:
    import torch

MAX_GROUPS = 4
"""Maximum number of micro-batch groups of an interleaved schedule. Warm-up takes 2 (PP - 1) + (VP - 1) x group chunks,
which is less than three groups, and then the order repeats with each group: further groups execute the same code."""
DDP_OVERLAPS = ("overlap_grad_reduce", "align_grad_reduce", "overlap_param_gather", "align_param_gather")
"""Fields of `DistributedDataParallelConfig` that select the hooks of a schedule."""
RESULTS: dict[tuple[Any, ...], set[str]] = {}
"""Cached results of `run` by all inputs of a schedule; thousands of configurations share a few hundred schedules."""


class Batch(NamedTuple):
    """The batch sizes of the recipe's data module, in samples."""

    micro: int
    total: int
    """Global batch size."""
    rampup: list[int] | None = None
    """Megatron's `rampup_batch_size`: start, increment, samples."""

    @classmethod
    def from_data(cls, data: Any) -> Batch:
        """Read the batch sizes of a recipe's data module."""
        return cls(data.micro_batch_size, data.global_batch_size, getattr(data, "rampup_batch_size", None))


def run(config: Any, ddp: Any, batch: Batch) -> set[str]:
    """Run the schedule of the current rank of Megatron's parallel state, for training and for validation.

    Args:
        config: the model configuration after `meta_build.connect_model`.
        ddp: the strategy's `DistributedDataParallelConfig`, if it has one.
        batch: the batch sizes.

    Returns:
        Lines with the schedule's name and its communication, for a digest.

    Raises:
        AssertionError, IndexError, RuntimeError, ValueError: Megatron rejects the schedule.
        NotParallelError: the stages of a pipeline do not communicate.
    """
    from megatron.core import parallel_state as state

    full_count = micro_batches(batch)
    vp = config.virtual_pipeline_model_parallel_size
    pp = state.get_pipeline_model_parallel_world_size()
    group = config.microbatch_group_size_per_vp_stage or pp
    count = reduce_micro_batches(full_count, pp, group, is_interleaved=vp is not None)
    if config.num_microbatches_with_partial_activation_checkpoints is not None:
        count = full_count
    fields = [str(getattr(config, name, None)) for name in _schedule_fields()]
    chunks = vp or 1
    overlaps = [bool(getattr(ddp, name, False)) for name in DDP_OVERLAPS]
    key = (count, chunks, pp, state.get_pipeline_model_parallel_rank(), *fields, *overlaps)
    if key not in RESULTS:
        try:
            RESULTS[key] = _run(config, ddp, count, chunks)
        except Exception:
            if count == full_count:
                raise
            # So that the error contains the real number of micro-batches.
            RESULTS[key] = _run(config, ddp, full_count, chunks)
    return RESULTS[key]


def micro_batches(batch: Batch) -> int:
    """Return the number of micro-batches per step and rank, from Megatron's own calculator.

    Raises:
        AssertionError: the global batch is not a multiple of the micro-batch times the data-parallel size.
    """
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core import parallel_state as state

    build = calculator._build_num_microbatches_calculator
    return build(1, batch.rampup, batch.total, batch.micro, state.get_data_parallel_world_size(), False).get()


def reduce_micro_batches(count: int, pp: int, group: int, *, is_interleaved: bool) -> int:
    """Return the smallest number of micro-batches with which a schedule executes the same code as with `count`.

    Without interleaving, a rank has at most PP - 1 warm-up micro-batches, and all following ones are treated equally.
    With interleaving, the order repeats with every group, and the incomplete last group is kept.

    Examples:
        >>> [reduce_micro_batches(count, pp=8, group=8, is_interleaved=False) for count in (512, 6)]
        [10, 6]
        >>> [reduce_micro_batches(count, pp=8, group=8, is_interleaved=True) for count in (514, 18)]
        [34, 18]
    """
    if not is_interleaved:
        return min(count, pp + 2)
    groups, rest = divmod(count, group)
    return min(groups, MAX_GROUPS) * group + rest


@functools.cache
def _schedule_fields() -> tuple[str, ...]:
    """Return the configuration fields that Megatron's schedules and their p2p communication read."""
    from megatron.core.pipeline_parallel import p2p_communication, schedules

    source = inspect.getsource(schedules) + inspect.getsource(p2p_communication)
    return tuple(sorted({*re.findall(r"config\.(\w+)", source)} - {"timers", "hidden_size"}))


class _StopBeforeFirstStep(Exception):
    """Ends a schedule whose checks have passed, because the following code requires a real model."""


def _run(config: Any, ddp: Any, count: int, chunks: int) -> set[str]:
    """Run a schedule with `count` micro-batches and `chunks` chunks; return lines with its name and communication.

    The tensors have one element, because no check of a schedule depends on their shapes.
    """
    from megatron.core import parallel_state as state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    config = copy.copy(config)
    config.timers, config.hidden_size = None, 1
    config.finalize_model_grads_func = None  # it would reduce real gradients
    model = [_build_identity_chunk(config, stage) for stage in range(chunks)]
    _set_hooks(config, ddp, model)
    tokens = config.context_parallel_size * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    schedule = get_forward_backward_func()
    with replace_device_functions(), communication.record_traffic() as traffic:
        for forward_only in (False, True):
            with contextlib.suppress(_StopBeforeFirstStep):
                schedule(
                    forward_step_func=_forward_step,
                    data_iterator=[iter(()) for _ in model],
                    model=model,
                    num_microbatches=count,
                    seq_length=tokens,
                    micro_batch_size=1,
                    forward_only=forward_only,
                )
    pp = state.get_pipeline_model_parallel_world_size()
    if not config.overlap_moe_expert_parallel_comm:
        communication.require_pipeline(traffic, pp)
    return {f"{schedule.__name__}: {pp} stages of {chunks}", *(f"schedule: {line}" for line in traffic.lines())}


def _set_hooks(config: Any, ddp: Any, model: list[Any]) -> None:
    """Set the synchronization functions in the configuration, like NeMo's megatron_parallel.py and _strategy_lib.py."""
    from nemo.lightning.megatron_parallel import extract_ddp_funcs

    config.no_sync_func, config.grad_sync_func = extract_ddp_funcs(ddp, model)
    if getattr(ddp, "overlap_param_gather", False) and getattr(ddp, "align_param_gather", False):
        gathers = [chunk.start_param_sync for chunk in model]
        config.param_sync_func = gathers[0] if len(model) == 1 else gathers


def _forward_step(_data: Any, chunk: Any, *flags: Any, **given: Any) -> tuple[torch.Tensor, Any]:
    """Return the output of the stage, which autograd connects to its input, and a loss function."""
    if given or chunk.config.overlap_moe_expert_parallel_comm:
        raise _StopBeforeFirstStep
    return chunk(), lambda output: (output.sum(), {})


def _build_identity_chunk(config: Any, stage: int) -> Any:
    """Return a model chunk that returns its input, for a virtual stage from 0."""
    import torch
    from megatron.core.enums import ModelType

    class Chunk(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config, self.model_type = config, ModelType.encoder_or_decoder
            self.vp_stage = stage if config.virtual_pipeline_model_parallel_size else None
            self.input_tensor: Any = None

        def set_input_tensor(self, input_tensor: Any) -> None:
            self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

        def forward(self) -> Any:
            if self.input_tensor is None:  # the first stage, which has tokens
                return torch.empty(1, 1, 1, dtype=config.pipeline_dtype or torch.float32, requires_grad=True) * 1
            return self.input_tensor * 1

        def no_sync(self) -> Any:
            return contextlib.nullcontext()

        def start_grad_sync(self, *_: Any) -> None: ...

        start_param_sync = start_grad_sync

    return Chunk()


@contextlib.contextmanager
def replace_device_functions() -> Iterator[None]:
    """Replace the functions of torch that need a GPU in a step: devices, NVTX ranges and coalesced p2p operations."""
    import torch

    with (
        mock.patch.object(torch.cuda, "device", _NoOperation),
        mock.patch.object(torch.distributed, "_coalescing_manager", _NoOperation),
        mock.patch.object(torch.distributed.distributed_c10d, "_coalescing_manager", _NoOperation),
        mock.patch.object(torch.cuda.nvtx, "range_push"),
        mock.patch.object(torch.cuda.nvtx, "range_pop"),
        mock.patch.object(torch.cuda.nvtx, "range", _NoOperation),
    ):
        yield


class _NoOperation(contextlib.AbstractContextManager["_NoOperation"]):
    """A context manager without effect, instead of torch.cuda.device, an NVTX range and coalesced p2p operations."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def wait(self) -> None:
        """Return immediately: operations of the fake process group are complete."""
