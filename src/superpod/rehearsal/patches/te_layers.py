"""Transformer layers in plain torch with the module and parameter names of Transformer Engine's layers."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest.mock import NonCallableMock

from superpod.rehearsal.patches.registry import define, patch, rebind, replace

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig


def create_layer_norm_linear_class() -> type[torch.nn.Module]:
    """Create a torch version of TELayerNormColumnParallelLinear: a linear layer that contains a norm's parameters."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    from superpod.rehearsal.patches.norms import add_norm_parameters, normalize

    class LayerNormColumnParallelLinear(ColumnParallelLinear):
        config: TransformerConfig
        layer_norm_weight: torch.Tensor

        def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kw: Any) -> None:
            super().__init__(input_size, output_size, config=config, **kw)
            self.epsilon = config.layernorm_epsilon
            self.return_layernorm_output = False  # as in TE; adapters set it, because they need the norm's output
            add_norm_parameters(self, config, input_size, prefix="layer_norm_")

        def forward(self, x: torch.Tensor, *args: Any, **kw: Any) -> tuple[Any, torch.Tensor | None]:
            bias = getattr(self, "layer_norm_bias", None)
            normed = normalize(x, self.config, self.epsilon, self.layer_norm_weight, bias)
            output, bias = super().forward(normed, *args, **kw)
            return ((output, normed) if self.return_layernorm_output else output), bias

    return LayerNormColumnParallelLinear


def create_linear_class() -> type[torch.nn.Module]:
    """Create a torch version of TELinear for latent attention, where every tensor-parallel rank holds the full matrix.

    Source: megatron/core/transformer/multi_latent_attention.py.
    """
    import torch

    class Linear(torch.nn.Module):
        is_duplicated = True

        def __init__(
            self,
            input_size: int,
            output_size: int,
            *,
            config: TransformerConfig,
            init_method: Callable[[torch.Tensor], object],
            **kw: object,
        ) -> None:
            super().__init__()
            self.config = config
            if kw.get("parallel_mode") != "duplicated" or kw.get("bias"):
                raise NotImplementedError(f"a linear layer with {kw} is not used by Megatron-Core 0.15.3")
            weight: Any = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
            if config.perform_initialization:
                init_method(weight)  # with the RNG state that all ranks share
            weight.allreduce = True
            weight.sequence_parallel = config.sequence_parallel  # Megatron sums the gradient over TP where it is set
            self.weight: torch.nn.Parameter = weight

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return torch.nn.functional.linear(x, self.weight), None

        def get_extra_state(self) -> None:
            """Return None, so that a checkpoint contains the key under which TE's layers store FP8 scales."""

        def set_extra_state(self, state: object) -> None:
            """Ignore the FP8 scales in a checkpoint of a GPU run."""

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: object = None
        ) -> dict[str, Any]:
            from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

            state = self.state_dict(prefix="", keep_vars=True)
            return make_sharded_tensors_for_checkpoint(state, prefix, {}, sharded_offsets)

    return Linear


def create_spec_provider_class(fused: type, linear: type) -> type:
    """Create a spec provider (megatron/core/models/backends.py) with TE's structure and modules of Megatron-Core.

    `fused` is the class of linear layers that contain a norm, `linear` that of layers duplicated on all ranks.
    """
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    class TorchSpecProvider(LocalSpecProvider):
        def fuse_layernorm_and_linear(self) -> bool:
            return True

        def column_parallel_layer_norm_linear(self) -> type:
            return fused

        def linear(self) -> type:
            return linear

        def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
            return WrappedTorchNorm

        def grouped_mlp_modules(self, *_: object) -> tuple[type, MLPSubmodules]:
            return SequentialMLP, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)

    return TorchSpecProvider


@patch(
    "te-layers",
    target="megatron.core.models.gpt.gpt_layer_specs: get_gpt_layer_local_spec, TESpecProvider",
    reason="without TE, NeMo uses Megatron's local layers, whose parameters have different names "
    "(input_layernorm.weight): the model would differ from that of a GPU run",
)
def _patch_te_layers() -> None:
    from megatron.core.models.gpt import gpt_layer_specs, moe_module_specs
    from megatron.core.transformer import multi_latent_attention, multi_token_prediction
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    linear = create_linear_class()
    provider = create_spec_provider_class(create_layer_norm_linear_class(), linear)
    define(multi_latent_attention, TELinear=linear)  # it tests for this class to duplicate the matrix on all ranks
    for module in (gpt_layer_specs, moe_module_specs, multi_token_prediction):
        define(module, TESpecProvider=provider, LocalSpecProvider=provider)  # TESpecProvider is undefined without TE
    define(gpt_layer_specs, TENorm=WrappedTorchNorm, LNImpl=WrappedTorchNorm)
    te_spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec

    def local_spec(*_: object, **kw: Any) -> object:
        names = ("num_experts", "qk_layernorm", "multi_latent_attention", "qk_l2_norm")
        return te_spec(**{name: kw[name] for name in names if name in kw})

    rebind(gpt_layer_specs, "get_gpt_layer_local_spec", local_spec)


@patch(
    "te-classes",
    target="megatron.core.extensions.transformer_engine: TENorm, TERowParallelLinear, TEDotProductAttention, ...",
    reason="Gemma 2 and 3 use TE's classes directly, also as base classes; without TE they are mocks",
)
def _patch_te_classes() -> None:
    from megatron.core.extensions import transformer_engine
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    stand_ins = {
        "TENorm": WrappedTorchNorm,
        "TEColumnParallelLinear": ColumnParallelLinear,
        "TERowParallelLinear": RowParallelLinear,
        "TELayerNormColumnParallelLinear": create_layer_norm_linear_class(),
        "TEDotProductAttention": DotProductAttention,
    }
    for name, stand_in in stand_ins.items():
        rebind(transformer_engine, name, stand_in)
    for model in ("gemma2", "gemma3"):  # in this order, because the second imports a class from the first
        _redefine_mocks(f"nemo.collections.llm.gpt.model.{model}")


def _redefine_mocks(module_name: str) -> None:
    """Replace the mocks that ``class X(mock)`` created in a loaded module by real classes.

    The module is executed again as a copy, and only the mocks are replaced, because recipes may already refer to the
    other classes.
    """
    module = sys.modules.get(module_name)
    if module is None:
        return
    mocks = [name for name, value in vars(module).items() if isinstance(value, NonCallableMock)]
    spec = importlib.util.find_spec(module_name) if mocks else None
    if spec and spec.loader:
        copy = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(copy)
        replace(module, **{name: getattr(copy, name) for name in mocks})
