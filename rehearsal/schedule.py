"""Runs Megatron's real schedule of a step, with chunks that do nothing: what it refuses at step 1, it refuses here.

`get_forward_backward_func` of megatron-core 0.15.3 (pipeline_parallel/schedules.py) chooses among three functions, and
each checks what no constructor does, such as `microbatch_group_size_per_vp_stage` against the micro-batches of a step.
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

from superpod.rehearsal import received

if TYPE_CHECKING:
    import torch

PERIODS = 4
"""Groups of micro-batches that an interleaved schedule runs at most. Warm-up passes 2 (PP - 1) + (VP - 1) x group
chunks, fewer than three groups have, and the order then repeats with each group: more of them run the same lines."""
SEEN: dict[tuple[Any, ...], set[str]] = {}
"""What each distinct schedule came to in this process: thousands of configurations share a few hundred."""


class Batch(NamedTuple):
    """The samples of a step, as the recipe's data module has them."""

    micro: int
    total: int
    rampup: list[int] | None = None

    @classmethod
    def of(cls, data: Any) -> Batch:
        """Of a recipe's data module."""
        return cls(data.micro_batch_size, data.global_batch_size, getattr(data, "rampup_batch_size", None))


def run(config: Any, ddp: Any, batch: Batch) -> set[str]:
    """Run the schedule of the current rank of Megatron's parallel state, for training and for validation.

    Args:
        config: of the connected model.
        ddp: the strategy's `DistributedDataParallelConfig`; None without.
        batch: of the whole run.

    Returns:
        The schedule, and what it communicated, as lines for a digest.

    Raises:
        AssertionError, IndexError, RuntimeError, ValueError: Megatron refuses the schedule.
        NotParallelError: a pipeline of several stages communicates nothing.
    """
    from megatron.core import parallel_state as state

    steps = micro_batches(batch)
    chunks = config.virtual_pipeline_model_parallel_size or 1
    pp = state.get_pipeline_model_parallel_world_size()
    group = config.microbatch_group_size_per_vp_stage or pp
    count = shortened(steps, pp, group, interleaved=config.virtual_pipeline_model_parallel_size is not None)
    if config.num_microbatches_with_partial_activation_checkpoints is not None:
        count = steps
    key = (count, chunks, pp, state.get_pipeline_model_parallel_rank(), *_read(config), *_overlaps(ddp))
    if key not in SEEN:
        try:
            SEEN[key] = _run(config, ddp, count, chunks)
        except Exception:
            if count == steps:
                raise
            SEEN[key] = _run(config, ddp, steps, chunks)  # the refusal names the real number of micro-batches
    return SEEN[key]


def micro_batches(batch: Batch) -> int:
    """The micro-batches of a step on the ranks of Megatron's parallel state, by its own calculator.

    Raises:
        AssertionError: they do not divide the batch.
    """
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core import parallel_state as state

    build = calculator._build_num_microbatches_calculator
    return build(1, batch.rampup, batch.total, batch.micro, state.get_data_parallel_world_size(), False).get()


def shortened(steps: int, pp: int, group: int, *, interleaved: bool) -> int:
    """Micro-batches that run the same lines of a schedule as `steps` do.

    Without interleaving a rank has at most PP - 1 micro-batches of warm-up, and each one after them is as the last.
    With it, the order repeats with every group, and what is left over after whole groups stays as it is.

    Examples:
        >>> shortened(512, pp=8, group=8, interleaved=False), shortened(6, pp=8, group=8, interleaved=False)
        (10, 6)
        >>> shortened(514, pp=8, group=8, interleaved=True), shortened(18, pp=8, group=8, interleaved=True)
        (34, 18)
    """
    if not interleaved:
        return min(steps, pp + 2)
    groups, rest = divmod(steps, group)
    return min(groups, PERIODS) * group + rest


@functools.cache
def _fields() -> tuple[str, ...]:
    """The fields of a configuration that the schedules and their communication read."""
    from megatron.core.pipeline_parallel import p2p_communication, schedules

    source = inspect.getsource(schedules) + inspect.getsource(p2p_communication)
    return tuple(sorted({*re.findall(r"config\.(\w+)", source)} - {"timers", "hidden_size"}))


def _read(config: Any) -> tuple[str, ...]:
    return tuple(str(getattr(config, name, None)) for name in _fields())


def _overlaps(ddp: Any) -> tuple[bool, ...]:
    names = ("overlap_grad_reduce", "align_grad_reduce", "overlap_param_gather", "align_param_gather")
    return tuple(bool(getattr(ddp, name, False)) for name in names)


class _StopBeforeFirstStep(Exception):
    """The schedule asks for a real model; its own checks have passed by then."""


def _run(config: Any, ddp: Any, count: int, chunks: int) -> set[str]:
    """Run `count` micro-batches of one number each: no check of a schedule depends on the sizes of its tensors."""
    from megatron.core import parallel_state as state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    config = copy.copy(config)
    config.timers, config.hidden_size = None, 1
    config.finalize_model_grads_func = None  # it reduces real gradients
    model = [_chunk(config, stage) for stage in range(chunks)]
    _connect(config, ddp, model)
    tokens = config.context_parallel_size * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    schedule = get_forward_backward_func()
    with without_device(), received.watched() as traffic:
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
        received.require_pipeline(traffic, pp)
    return {f"{schedule.__name__}: {pp} stages of {chunks}", *(f"schedule: {line}" for line in traffic.lines())}


def _connect(config: Any, ddp: Any, model: list[Any]) -> None:
    """Give the schedule NeMo's hooks (megatron_parallel.py; _strategy_lib.py, setup_megatron_optimizer)."""
    from nemo.lightning.megatron_parallel import extract_ddp_funcs

    config.no_sync_func, config.grad_sync_func = extract_ddp_funcs(ddp, model)
    if getattr(ddp, "overlap_param_gather", False) and getattr(ddp, "align_param_gather", False):
        gathers = [chunk.start_param_sync for chunk in model]
        config.param_sync_func = gathers[0] if len(model) == 1 else gathers


def _forward_step(_data: Any, chunk: Any, *flags: Any, **given: Any) -> tuple[torch.Tensor, Any]:
    """The stage's output, which depends on its input, and a loss of it."""
    if given or chunk.config.overlap_moe_expert_parallel_comm:
        raise _StopBeforeFirstStep
    return chunk(), lambda output: (output.sum(), {})


def _chunk(config: Any, stage: int) -> Any:
    """A stand-in for the chunk of a model: it passes its input on."""
    import torch
    from megatron.core.enums import ModelType

    class Chunk(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config, self.model_type = config, ModelType.encoder_or_decoder
            self.vp_stage = stage if config.virtual_pipeline_model_parallel_size else None
            self.given: Any = None

        def set_input_tensor(self, given: Any) -> None:
            self.given = given[0] if isinstance(given, list) else given

        def forward(self) -> Any:
            if self.given is None:  # the first stage, which has tokens
                return torch.empty(1, 1, 1, dtype=config.pipeline_dtype or torch.float32, requires_grad=True) * 1
            return self.given * 1

        def no_sync(self) -> Any:
            return contextlib.nullcontext()

        def start_grad_sync(self, *_: Any) -> None: ...

        start_param_sync = start_grad_sync

    return Chunk()


@contextlib.contextmanager
def without_device() -> Iterator[None]:
    """What a step asks of a GPU beside tensors: a current device, ranges for a profiler, messages sent together."""
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
    """Stands for torch.cuda.device, for a profiler's range and for messages that are sent together."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def wait(self) -> None:
        """Messages of the fake process group have arrived."""
