"""Patches for Megatron-FSDP on CPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from superpod.rehearsal.patches.registry import patch, replace

if TYPE_CHECKING:
    import torch


@patch(
    "fsdp-mesh",
    target="torch.distributed.DeviceMesh.from_group",
    reason="Megatron-FSDP and NeMo pass device_type='cuda', so they would expect parameter shards on a GPU",
)
def _patch_mesh() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    original = DeviceMesh.from_group

    def from_group(group: Any, device_type: str, *args: Any, **kwargs: Any) -> DeviceMesh:
        return original(group, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    replace(DeviceMesh, from_group=staticmethod(from_group))


class _ScaledSum:
    """A reduction operation that multiplies by `factor` before the sum, like NCCL's PREMUL_SUM."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


@patch(
    "fsdp-collectives",
    target="torch.distributed: all_reduce, reduce_scatter_tensor, _make_nccl_premul_sum",
    reason="Megatron-FSDP uses NCCL to average gradients or to scale them before the sum; gloo can only sum",
)
def _patch_collectives() -> None:
    import torch.distributed as dist

    all_reduce, reduce_scatter = dist.all_reduce, dist.reduce_scatter_tensor

    def get_factor(op: Any, group: Any) -> float | None:
        if isinstance(op, _ScaledSum):
            return op.factor
        return 1 / dist.get_world_size(group) if op == dist.ReduceOp.AVG else None

    def scaled_all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **kwargs: Any) -> Any:
        factor = get_factor(op, group)
        if factor is None:
            return all_reduce(tensor, op, group, **kwargs)
        return all_reduce(tensor.mul_(factor), dist.ReduceOp.SUM, group, **kwargs)

    def scaled_reduce_scatter(
        output: torch.Tensor, input: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **kwargs: Any
    ) -> Any:
        factor = get_factor(op, group)
        if factor is None:
            return reduce_scatter(output, input, op, group, **kwargs)
        return reduce_scatter(output, input * factor, dist.ReduceOp.SUM, group, **kwargs)

    replace(
        dist,
        all_reduce=scaled_all_reduce,
        reduce_scatter_tensor=scaled_reduce_scatter,
        _make_nccl_premul_sum=_ScaledSum,
    )
