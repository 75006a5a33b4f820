"""Checks that Megatron and Transformer Engine communicate in each kind of parallelism of a layout.

It is not sufficient to check the group that a constructor receives: with `cp_comm_type="a2a+p2p"`, NeMo 2.7.3 passes
`None` to Transformer Engine as the context-parallel group, and each rank attends only to its own tokens. Therefore, the
operations of the process groups are recorded during a step; a parallel size above 1 without any operation is an error.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from superpod.rehearsal.te.compiled import userbuffers

GATHERS = ("allgather", "_allgather_base", "allgather_into_tensor_coalesced", "all_gather_single")
SCATTERS = ("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "reduce_scatter_single")
EXCHANGES = ("allreduce", "broadcast", "alltoall", "alltoall_base", "all_to_all_single", "send", "recv")
"""Methods of torch.distributed.ProcessGroup that communicate."""
OVERLAPPED = "userbuffers"
"""Prefix of the recorded name of a userbuffer, which overlaps TP communication with GEMMs."""
BUFFERS = ("copy_into_buffer", "get_buffer")
"""Methods of a userbuffer that its communication calls."""


class NotParallelError(RuntimeError):
    """Megatron or Transformer Engine uses a parallel size that differs from the layout."""


@dataclass
class Traffic:
    """The operations of each process group during a step, and the arguments of context-parallel attention."""

    operations: dict[str, set[str]] = field(default_factory=dict)
    """Name and size of a process group -> operations."""
    attention: set[tuple[str, int]] = field(default_factory=set)
    """cp_comm_type and group size of each call of Transformer Engine's context-parallel attention."""

    def get_operations(self, group: Any) -> set[str]:
        """Return the names of the operations that a process group has executed."""
        return self.operations.get(_name(group), set())

    def lines(self) -> set[str]:
        """Return one line of text per process group and per kind of attention call, for a digest."""
        calls = {f"attention over context parallelism: {kind} {size}" for kind, size in self.attention}
        return {f"{group}: {', '.join(sorted(names))}" for group, names in self.operations.items()} | calls


@contextlib.contextmanager
def record_traffic() -> Iterator[Traffic]:
    """Record the communication and the calls of context-parallel attention within the block."""
    import torch.distributed as dist

    backends: Any = sys.modules.get("transformer_engine.pytorch.attention.dot_product_attention.backends")
    traffic = Traffic()
    with contextlib.ExitStack() as stack:
        methods = [(dist.ProcessGroup, name) for name in (*GATHERS, *SCATTERS, *EXCHANGES)]
        methods += [(userbuffers.CommOverlap, name) for name in BUFFERS]
        for owner, name in methods:
            recorded_operation = _record_operation(getattr(owner, name), name, traffic)
            stack.enter_context(mock.patch.object(owner, name, recorded_operation))
        if backends is not None:
            attention = _record_attention(backends.attn_forward_func_with_cp, traffic)
            stack.enter_context(mock.patch.object(backends, "attn_forward_func_with_cp", attention))
        yield traffic


def _record_operation(original: Any, operation: str, traffic: Traffic) -> Any:
    """Wrap a method of process groups so that its calls are recorded in `traffic` under the name `operation`."""

    def communicate(group: Any, *args: Any, **kwargs: Any) -> Any:
        traffic.operations.setdefault(_name(group), set()).add(operation)
        return original(group, *args, **kwargs)

    return communicate


def _name(group: Any) -> str:
    """Return the name of a process group or userbuffer, with its size unless that depends on the number of GPUs."""
    if isinstance(group, userbuffers.CommOverlap):
        return f"{OVERLAPPED} of {group.tp_size}"
    description = str(group.group_desc)
    if "DATA_PARALLEL" in description or description == "default_pg":
        return description
    return f"{description} of {group.size()}"


def _record_attention(original: Any, traffic: Traffic) -> Any:
    """Wrap `attn_forward_func_with_cp` (TE 2.9 context_parallel.py), whose arguments 11 and 14 are group and type."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        group = kwargs["cp_group"] if "cp_group" in kwargs else args[11]
        kind = kwargs["cp_comm_type"] if "cp_comm_type" in kwargs else args[14]
        size = 1
        for one in group if isinstance(group, list) else [group]:
            size *= one.size()
        traffic.attention.add((kind, size))
        return original(*args, **kwargs)

    return forward


def require_groups(sizes: dict[str, Any]) -> set[str]:
    """Require that Megatron's process groups have the sizes that the strategy specifies.

    Args:
        sizes: arguments of `initialize_model_parallel` (`meta_build.get_degrees`).

    Returns:
        One line per group with its size, for a digest.

    Raises:
        NotParallelError: a group has a different size.
    """
    from megatron.core import parallel_state as state

    tp, pp, cp, ep = (
        sizes[f"{name}_parallel_size"] or 1 for name in ("tensor_model", "pipeline_model", "context", "expert_model")
    )
    expert_tp = sizes["expert_tensor_parallel_size"] or tp
    groups = {
        "tensor parallel": (state.get_tensor_model_parallel_group(), tp),
        "pipeline parallel": (state.get_pipeline_model_parallel_group(), pp),
        "context parallel": (state.get_context_parallel_group(), cp),
        "expert parallel": (state.get_expert_model_parallel_group(), ep),
        "expert tensor parallel": (state.get_expert_tensor_parallel_group(), expert_tp),
    }
    for name, (group, expected) in groups.items():
        if group.size() != expected:
            raise NotParallelError(f"the {name} group has {group.size()} ranks, but the layout specifies {expected}")
    return {f"{name} group of {group.size()}" for name, (group, _) in groups.items()}


def require_layers(chunk: Any, tp: int) -> None:
    """Require that every column- and row-parallel layer of a model chunk has a tensor-parallel group of `tp` ranks.

    Raises:
        NotParallelError: a layer has no group, or a group of a different size.
    """
    import torch.distributed as dist

    for name, module in chunk.named_modules():
        if getattr(module, "parallel_mode", None) not in ("column", "row") or ".experts." in name:
            continue  # `require_experts` checks their groups
        group = getattr(module, "tp_group", None)
        group_size = dist.get_world_size(group) if group is not None else 1
        if (module.tp_size, group_size) != (tp, tp):
            raise NotParallelError(
                f"{name} is split over {module.tp_size} ranks and has a group of {group_size}, "
                f"but the layout specifies {tp}"
            )


def require_step(chunk: Any, config: Any, traffic: Traffic) -> None:
    """Require that a model chunk has communicated in each kind of parallelism with a size above 1.

    Args:
        chunk: the model chunk.
        config: its TransformerConfig.
        traffic: the communication recorded during a step of the chunk.

    Raises:
        NotParallelError: the chunk has not communicated in a kind of parallelism.
    """
    from megatron.core import parallel_state as state

    has_layers = any(len(getattr(chunk, name).layers) for name in ("encoder", "decoder") if hasattr(chunk, name))
    tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
    if tp > 1:
        operations = traffic.get_operations(state.get_tensor_model_parallel_group())
        overlapped_operations = traffic.operations.get(f"{OVERLAPPED} of {tp}", set())
        _require(operations or overlapped_operations, "tensor parallelism", tp)
        if config.sequence_parallel and has_layers and not overlapped_operations:
            _require(operations.intersection(GATHERS), "sequence parallelism", tp)
            _require(operations.intersection(SCATTERS), "sequence parallelism", tp)
    if cp > 1 and has_layers:
        _require(traffic.get_operations(state.get_context_parallel_group()), "context parallelism", cp)
        _require_attention(config, traffic)


def _require(operations: set[str], parallelism: str, size: int) -> None:
    """Raise NotParallelError if `size` > 1 but no communication of `parallelism`, such as TP, was recorded."""
    if not operations:
        raise NotParallelError(
            f"the layout has {parallelism} of {size}, but no layer communicates over its group: each rank "
            "would compute only with its own part"
        )


def _require_attention(config: Any, traffic: Traffic) -> None:
    """Require that all calls of context-parallel attention used the configured cp_comm_type and CP ranks."""
    cp_comm_type = config.cp_comm_type
    configured = set(cp_comm_type if isinstance(cp_comm_type, list) else [cp_comm_type or "p2p"])
    for kind, size in traffic.attention:
        if kind not in configured or size != config.context_parallel_size:
            raise NotParallelError(
                f"attention communicates with {kind} over {size} ranks, but the layout specifies "
                f"{' or '.join(sorted(configured))} over {config.context_parallel_size}"
            )


def require_pipeline(traffic: Traffic, pp: int) -> None:
    """Require that `pp` pipeline stages have sent and received activations, if `pp` is above 1.

    Raises:
        NotParallelError: the stages have not sent or received anything.
    """
    from megatron.core import parallel_state as state

    if pp > 1:
        operations = traffic.get_operations(state.get_pipeline_model_parallel_group())
        _require(operations.intersection(("send", "recv")), "pipeline parallelism", pp)


def require_experts(layer: Any, config: Any) -> str:
    """Require that the token dispatcher of a MoE layer has process groups of the sizes in the layout.

    Its communication is not recorded: a step on meta tensors replaces the dispatcher, which reads their values.

    Returns:
        A line with the class and the group sizes of the dispatcher, for a digest.

    Raises:
        NotParallelError: a group or the number of local experts has a different size.
    """
    dispatcher = layer.token_dispatcher
    ep = config.expert_model_parallel_size
    expert_tp = config.expert_tensor_parallel_size or config.tensor_model_parallel_size
    sizes = {"ep_group": ep, "tp_group": expert_tp, "tp_ep_group": ep * expert_tp}
    for name, size in sizes.items():
        group = getattr(dispatcher, name)
        group_size = group.size() if group is not None else 1
        if group_size != size:
            raise NotParallelError(f"the dispatcher's {name} has {group_size} ranks, but the layout specifies {size}")
    if layer.num_local_experts * ep != config.num_moe_experts:
        raise NotParallelError(
            f"a rank has {layer.num_local_experts} of {config.num_moe_experts} experts with expert parallelism of {ep}"
        )
    return f"{type(dispatcher).__name__} over ep {ep} and tp {expert_tp}"
