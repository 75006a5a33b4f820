"""Patches for LoRA and DoRA adapters of linear layers in plain torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from superpod.rehearsal.patches.registry import define, patch, rebind, replace

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.moe.experts import SequentialMLP
    from nemo.lightning.pytorch.callbacks.peft import PEFT


class _UnusedLinear:
    """Replaces `te.Linear`, so that NeMo's isinstance checks are false."""


@patch(
    "adapters",
    target="nemo.collections.llm.peft: utils.HAVE_TE, utils.get_adapter_attributes_from_linear, lora.te, DoRALinear",
    reason="NeMo mistakes Megatron's placeholders for Transformer Engine's classes; and an adapter needs its layer's "
    "input after the norm, which TE's fused layer returns with its output",
)
def _patch_adapters() -> None:
    import nemo.collections.llm  # noqa: F401 - first, because the module of the adapters has a circular import
    from nemo.collections.llm.peft import dora, lora, utils

    original: Any = utils.get_adapter_attributes_from_linear

    def get_attributes(layer: Any) -> tuple[bool, int, int, bool, bool]:
        if getattr(layer, "is_duplicated", False):
            rows, columns = layer.weight.shape
            return False, columns, rows, not layer.config.sequence_parallel, False
        if hasattr(layer, "return_layernorm_output"):
            layer.return_layernorm_output = True
        return original(layer)

    original_norm = dora.DoRALinear._get_weight_norm

    def get_weight_norm(self: Any) -> torch.Tensor:
        """Return the magnitude of each output; on the meta device, a tensor of its shape."""
        weight = self.to_wrap.weight
        return weight.new_empty(weight.shape[0]) if weight.is_meta else original_norm(self)

    replace(dora.DoRALinear, _get_weight_norm=get_weight_norm)
    replace(utils, HAVE_TE=False)
    define(lora, te=SimpleNamespace(Linear=_UnusedLinear))
    rebind(utils, "get_adapter_attributes_from_linear", get_attributes)


@patch(
    "adapters-of-experts",
    target="nemo.lightning.pytorch.callbacks.peft.PEFT.__call__, SequentialMLP.sharded_state_dict",
    reason="grouped GEMM has one adapter for all experts, whose gradient is averaged over the ranks that share it; "
    "with one GEMM per expert, each expert would have its own adapter: a different model, which also depends on EP",
)
def _patch_adapters_of_experts() -> None:
    import nemo.collections.llm  # noqa: F401 - first, as above
    from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
    from megatron.core.transformer.moe.experts import SequentialMLP
    from nemo.lightning.pytorch.callbacks.peft import PEFT

    call, sharded = PEFT.__call__, SequentialMLP.sharded_state_dict

    def call_and_share(self: PEFT, model: torch.nn.Module) -> torch.nn.Module:
        adapted = call(self, model)
        share_among_experts(adapted)
        return adapted

    def save_shared(
        self: SequentialMLP, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the sharded state with shared adapters outside of the experts, like with grouped GEMM."""
        state = sharded(self, prefix, sharded_offsets, metadata)
        for name, adapter in _find_shared_adapters(self).items():
            state = {key: value for key, value in state.items() if f".{name}.adapter." not in key}
            first = f"{prefix}local_experts.0."
            shared = adapter.sharded_state_dict(f"{first}{name}.adapter.", sharded_offsets, metadata)
            replace_prefix_for_sharding(shared, first, prefix)
            state |= shared
        return state

    replace(PEFT, __call__=call_and_share)
    replace(SequentialMLP, sharded_state_dict=save_shared)


def _find_shared_adapters(experts: SequentialMLP) -> dict[str, Any]:
    """Return {name of a linear layer: adapter} of the adapters that all experts of this rank share."""
    layers = experts.local_experts[0].named_children()
    return {name: layer.adapter for name, layer in layers if getattr(layer, "has_shared_adapter", False)}


def share_among_experts(model: torch.nn.Module) -> None:
    """Make all experts of a rank share one LoRA adapter per linear layer, if the recipe uses grouped GEMM."""
    from megatron.core.transformer.moe.experts import SequentialMLP
    from nemo.collections.llm.peft.utils import ParallelLinearAdapter

    from superpod.rehearsal.patches.gpu_settings import dropped

    if "moe_grouped_gemm" not in dropped:
        return
    for experts in [module for module in model.modules() if isinstance(module, SequentialMLP)]:
        first, *others = experts.local_experts
        layers: dict[str, Any] = dict(first.named_children())
        for name, layer in layers.items():
            if type(getattr(layer, "adapter", None)) is ParallelLinearAdapter:
                layer.has_shared_adapter = True
                for other in others:
                    getattr(other, name).adapter = layer.adapter


def initialize_independently_of_layout() -> None:
    """Patch NeMo's adapters so that their initial weights are the same in every layout.

    Each kind of layer has its own seed. Megatron initializes the shard of each rank from that rank's own generator.
    """
    from nemo.collections.llm.peft import utils

    original = utils.ParallelLinearAdapter.__init__

    def init(
        self: Any, in_features: int, out_features: int, dim: int, base_linear_name: str, *args: Any, **kw: Any
    ) -> None:
        original(self, in_features, out_features, dim, base_linear_name, *args, **kw)
        _initialize(self.linear_in.weight, base_linear_name.rpartition(".")[2])

    replace(utils.ParallelLinearAdapter, __init__=init)


def _initialize(weight: torch.Tensor, seed: str) -> None:
    """Set `weight` to this rank's shard of a full matrix that is drawn with a generator seeded with the text `seed`."""
    import zlib

    import torch
    from megatron.core import parallel_state

    if weight.is_meta:
        return
    dim, shape = getattr(weight, "partition_dim", 0), list(weight.shape)
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    shape[dim] *= ranks
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    full = torch.empty(shape).uniform_(-1, 1, generator=generator) * (3 / shape[1]) ** 0.5
    shard = full.chunk(ranks, dim)[parallel_state.get_tensor_model_parallel_rank()]
    with torch.no_grad():
        weight.copy_(shard)
