"""Runs `llm.prune` without a GPU: replaces the code of NeMo 2.7.3 and ModelOpt 0.37 that needs TE, CUDA or NCCL.

`llm.prune` creates its own trainer, so a recipe cannot select CPUs. `patch_for_cpus` replaces four names:

- The trainer runs on CPUs.
- The layers are Megatron-Core's own instead of layers with Transformer Engine's norm and attention. Each norm remains a
  separate module, because ModelOpt cannot prune a fused one.
- All norms have one class, which is registered with ModelOpt in the same way as Transformer Engine's norms.
- A scalar is gathered as a tensor of one element. ModelOpt counts the layers that each pipeline rank keeps in a 0-dim
  tensor, which NCCL accepts but gloo rejects ("allgather: invalid tensor size at index 0 ... expected (), got (1)").

ModelOpt and NeMo still determine the importance of layers, heads and channels, prune the model, and save it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from superpod.rehearsal.errors import RehearsalError

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig
    from nemo.collections.llm import GPTConfig


@contextmanager
def patch_for_cpus() -> Iterator[None]:
    """Replace the code of `llm.prune` that needs a GPU within the block. `rehearsal.install` must be called first."""
    import torch.distributed
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from nemo import lightning as nl
    from nemo.collections.llm.modelopt import model_utils

    names = {name: getattr(nl, name) for name in ("MegatronStrategy", "MegatronMixedPrecision", "io")}
    lightning = SimpleNamespace(**names, Trainer=_build_trainer)
    gather = functools.partial(_gather_into_tensor, torch.distributed.all_gather_into_tensor)
    with (
        mock.patch.object(model_utils, "nl", lightning),
        mock.patch.object(model_utils, "get_gpt_modelopt_spec", _build_layer_spec, create=True),
        mock.patch.object(WrappedTorchNorm, "__new__", _build_norm),
        mock.patch.object(torch.distributed, "all_gather_into_tensor", gather),
    ):
        yield


def _build_trainer(**settings: Any) -> object:
    """Return NeMo's trainer with these settings, on CPUs."""
    from nemo import lightning as nl

    trainer: Any = nl.Trainer
    return trainer(**settings | {"accelerator": "cpu"})


def _build_layer_spec(config: GPTConfig, **_: object) -> ModuleSpec:
    """Return the spec of a dense layer with separate norm modules, which have their usual names in checkpoints.

    Raises:
        RehearsalError: the model has experts or latent attention.
    """
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    if config.num_moe_experts or config.multi_latent_attention:
        raise RehearsalError(
            "pruning of models with experts or latent attention cannot be rehearsed", "prune the model on a GPU"
        )
    qk_norm = WrappedTorchNorm if config.qk_layernorm else IdentityOp
    attention: Any = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=DotProductAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    mlp: Any = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    add: Any = get_bias_dropout_add  # Megatron accepts functions here, but its types allow modules only
    layer: Any = TransformerLayerSubmodules(
        input_layernorm=WrappedTorchNorm,
        self_attention=ModuleSpec(SelfAttention, {"attn_mask_type": AttnMaskType.causal}, attention),
        self_attn_bda=add,
        pre_mlp_layernorm=WrappedTorchNorm,
        mlp=ModuleSpec(MLP, submodules=mlp),
        mlp_bda=add,
        sharded_state_dict_keys_map={
            "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
            "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
        },
    )
    return ModuleSpec(TransformerLayer, submodules=layer)


def _gather_into_tensor(gather: Any, output: torch.Tensor, value: torch.Tensor, *args: Any, **kw: Any) -> object:
    """Call `all_gather_into_tensor`, with a 0-dim tensor reshaped to one element."""
    if value.dim() == 0:
        value = value.reshape(-1)
    return gather(output, value, *args, **kw)


def _build_norm(
    _cls: type, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
) -> torch.nn.Module:
    return _register_norm_class()(config, hidden_size, eps)


@functools.cache
def _register_norm_class() -> type[torch.nn.Module]:
    """Create the norm class of a rehearsal once, and register it with ModelOpt, which identifies modules by class."""
    from modelopt.torch.nas.modules import _DynamicLayerNorm
    from modelopt.torch.nas.registry import DMRegistry
    from modelopt.torch.nas.traced_hp import TracedHp

    from superpod.rehearsal.patches.norms import create_norm_class

    plain_norm = create_norm_class()

    class DynamicNorm(_DynamicLayerNorm):
        """A counterpart of ModelOpt's class for Transformer Engine's norms."""

        def _setup(self) -> None:
            module: Any = self
            module._register_hparam("num_features", TracedHp(list(range(1, module.weight.shape[-1] + 1))))
            for name, _ in list(module.named_parameters(recurse=False)):
                module._register_dynamic_attribute(name, module._cut_to_active_features)

    DMRegistry.register({plain_norm: "superpod.rehearsal.patches.norms.Norm"})(DynamicNorm)
    return plain_norm
