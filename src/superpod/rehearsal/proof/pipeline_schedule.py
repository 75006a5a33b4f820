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
RESULTS: dict[tuple[Any, ...], set[str]] = {}
"""Cached results of the distinct schedules; thousands of configurations share a few hundred schedules."""


class Batch(NamedTuple):
    """The batch sizes of the recipe's data module, in samples."""

    micro: int
    total: int
    rampup: list[int] | None = None

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
        The schedule and its communication, as lines for a digest.

    Raises:
        AssertionError, IndexError, RuntimeError, ValueError: Megatron rejects the schedule.
        NotParallelError: the stages of a pipeline do not communicate.
    """
    from megatron.core import parallel_state as state

    steps = micro_batches(batch)
    chunks = config.virtual_pipeline_model_parallel_size or 1
    pp = state.get_pipeline_model_parallel_world_size()
    group = config.microbatch_group_size_per_vp_stage or pp
    count = reduce_micro_batches(
        steps, pp, group, is_interleaved=config.virtual_pipeline_model_parallel_size is not None
    )
    if config.num_microbatches_with_partial_activation_checkpoints is not None:
        count = steps
    fields = [str(getattr(config, name, None)) for name in _schedule_fields()]
    key = (count, chunks, pp, state.get_pipeline_model_parallel_rank(), *fields, *_overlaps(ddp))
    if key not in RESULTS:
        try:
            RESULTS[key] = _run(config, ddp, count, chunks)
        except Exception:
            if count == steps:
                raise
            RESULTS[key] = _run(
                config, ddp, steps, chunks
            )  # so that the error contains the real number of micro-batches
    return RESULTS[key]


def micro_batches(batch: Batch) -> int:
    """Return the number of micro-batches per step and rank, from Megatron's own calculator.

    Raises:
        AssertionError: the batch is not divisible.
    """
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core import parallel_state as state

    build = calculator._build_num_microbatches_calculator
    return build(1, batch.rampup, batch.total, batch.micro, state.get_data_parallel_world_size(), False).get()


def reduce_micro_batches(steps: int, pp: int, group: int, *, is_interleaved: bool) -> int:
    """Return a smaller number of micro-batches with which a schedule executes the same code as with `steps`.

    Without interleaving, a rank has at most PP - 1 warm-up micro-batches, and all following ones are treated equally.
    With interleaving, the order repeats with every group, and the incomplete last group is kept.

    Examples:
        >>> [reduce_micro_batches(steps, pp=8, group=8, is_interleaved=False) for steps in (512, 6)]
        [10, 6]
        >>> [reduce_micro_batches(steps, pp=8, group=8, is_interleaved=True) for steps in (514, 18)]
        [34, 18]
    """
    if not is_interleaved:
        return min(steps, pp + 2)
    groups, rest = divmod(steps, group)
    return min(groups, MAX_GROUPS) * group + rest


@functools.cache
def _schedule_fields() -> tuple[str, ...]:
    """Return the configuration fields that Megatron's schedules and their p2p communication read."""
    from megatron.core.pipeline_parallel import p2p_communication, schedules

    source = inspect.getsource(schedules) + inspect.getsource(p2p_communication)
    return tuple(sorted({*re.findall(r"config\.(\w+)", source)} - {"timers", "hidden_size"}))


def _overlaps(ddp: Any) -> tuple[bool, ...]:
    names = ("overlap_grad_reduce", "align_grad_reduce", "overlap_param_gather", "align_param_gather")
    return tuple(bool(getattr(ddp, name, False)) for name in names)


class _StopBeforeFirstStep(Exception):
    """The checks of the schedule have passed; the following code requires a real model."""


def _run(config: Any, ddp: Any, count: int, chunks: int) -> set[str]:
    """Run `count` micro-batches with tensors of one element, because no check of a schedule depends on their shapes."""
    from megatron.core import parallel_state as state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    config = copy.copy(config)
    config.timers, config.hidden_size = None, 1
    config.finalize_model_grads_func = None  # it would reduce real gradients
    model = [_chunk(config, stage) for stage in range(chunks)]
    _connect(config, ddp, model)
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


def _connect(config: Any, ddp: Any, model: list[Any]) -> None:
    """Set the hooks of NeMo in the configuration (megatron_parallel.py; _strategy_lib.py, setup_megatron_optimizer)."""
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


def _chunk(config: Any, stage: int) -> Any:
    """Create a model chunk that returns its input."""
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
    """Replace the GPU functions that a step calls, except tensors: device, NVTX ranges, coalesced p2p operations."""
    import torch

    with (
        mock.patch.object(torch.cuda, "device", _NoDevice),
        mock.patch.object(torch.distributed, "_coalescing_manager", _NoDevice),
        mock.patch.object(torch.distributed.distributed_c10d, "_coalescing_manager", _NoDevice),
        mock.patch.object(torch.cuda.nvtx, "range_push"),
        mock.patch.object(torch.cuda.nvtx, "range_pop"),
        mock.patch.object(torch.cuda.nvtx, "range", _NoDevice),
    ):
        yield


class _NoDevice(contextlib.AbstractContextManager["_NoDevice"]):
    """Replaces torch.cuda.device, an NVTX range and coalesced p2p operations."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def wait(self) -> None:
        """Return immediately: operations of the fake process group are complete."""
