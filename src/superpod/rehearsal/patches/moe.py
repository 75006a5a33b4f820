"""Patches of Megatron's mixture-of-experts layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from superpod.rehearsal.patches.registry import define, patch, rebind, replace

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


@patch(
    "moe-router-gemm",
    target="megatron.core.transformer.moe.moe_utils.te_general_gemm",
    reason="without TE, megatron-core 0.15.3 reads the name but never defines it: NameError",
)
def _patch_router_gemm() -> None:
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        define(moe_utils, te_general_gemm=None)


@patch(
    "moe-splits",
    target="megatron.core.transformer.moe.moe_utils.maybe_move_tensor_to_cpu",
    reason="it converts CUDA tensors to the sequences that all_to_all requires, but does not convert CPU tensors",
)
def _patch_splits() -> None:
    import torch
    from megatron.core.transformer.moe import moe_utils

    def to_cpu(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    rebind(moe_utils, "maybe_move_tensor_to_cpu", to_cpu)


@patch(
    "moe-uneven-gather",
    target="megatron.core.tensor_parallel.mappings: _gather_along_first_dim, _reduce_scatter_along_first_dim",
    reason="experts receive unequal numbers of tokens, but gloo gathers and scatters only equal shards: pad, then trim",
)
def _patch_uneven() -> None:
    import torch
    import torch.distributed as dist
    from megatron.core.tensor_parallel import mappings

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def uneven_gather(
        x: torch.Tensor, group: ProcessGroup, sizes: Sequence[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return gather(x, group, sizes, use_global_buffer)
        sizes = [int(size) for size in sizes]
        padded_rows = x.new_zeros((max(sizes), *x.shape[1:]))
        padded_rows[: x.size(0)] = x
        shards = [torch.empty_like(padded_rows) for _ in sizes]
        dist.all_gather(shards, padded_rows, group=group)
        return torch.cat([shard[:size] for shard, size in zip(shards, sizes, strict=True)])

    def uneven_scatter(
        x: torch.Tensor, group: ProcessGroup, sizes: Sequence[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return scatter(x, group, sizes, use_global_buffer)
        total = x.clone().contiguous()
        dist.all_reduce(total, group=group)
        return total.split([int(size) for size in sizes])[group.rank()].contiguous()

    rebind(mappings, "_gather_along_first_dim", uneven_gather)
    rebind(mappings, "_reduce_scatter_along_first_dim", uneven_scatter)


@patch(
    "expert-bias",
    target="megatron.core.tensor_parallel: mappings._reduce, RowParallelLinear.__init__",
    reason="without grouped GEMM, each expert adds its bias in place to the tensor that a reduction over one rank "
    "returns unchanged, which autograd forbids, and sums the bias gradients over ranks with different experts",
)
def _patch_expert_bias() -> None:
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    reduce, original = mappings._reduce, RowParallelLinear.__init__

    def reduce_to_new_tensor(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        return x.clone() if group.size() == 1 else reduce(x, group)

    def init(self: Any, *args: Any, **kw: Any) -> None:
        original(self, *args, **kw)
        if self.is_expert and self.bias is not None:
            self.bias.sequence_parallel = False
            # No other rank has this bias; without this attribute, the gradient norm would exclude it.
            self.bias.tensor_model_parallel = True

    rebind(mappings, "_reduce", reduce_to_new_tensor)
    replace(RowParallelLinear, __init__=init)
