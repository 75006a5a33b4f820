"""`llm.prune` without a GPU: what NeMo 2.7.3 and ModelOpt 0.37 take from Transformer Engine, CUDA and NCCL there.

`llm.prune` makes its own trainer, so that no recipe can say that it runs on CPUs. Inside `on_cpus` four
names are others:

- NeMo's trainer of a pruning runs on CPUs.
- Its layers are Megatron-Core's own; ModelOpt takes some with Transformer Engine's norm and
  attention. As there, a norm is a module of its own: ModelOpt cannot make a fused one narrower.
- Norms are one class, which ModelOpt has been told how to make narrower, as it knows Transformer Engine's.
- A number is gathered as a tensor of one element. ModelOpt counts the layers that each pipeline rank keeps in a tensor
  without a dimension: NCCL takes it, and gloo refuses it ("allgather: invalid tensor size at index 0 ... expected (),
  got (1)"). The number is the same.

The importance of layers, heads and channels, what is cut, and how it is saved, are ModelOpt's and NeMo's.
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
def on_cpus() -> Iterator[None]:
    """Inside, `llm.prune` runs on this machine's CPUs. The rehearsal's patches must be installed."""
    import torch.distributed
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from nemo import lightning as nl
    from nemo.collections.llm.modelopt import model_utils

    names = {name: getattr(nl, name) for name in ("MegatronStrategy", "MegatronMixedPrecision", "io")}
    lightning = SimpleNamespace(**names, Trainer=_trainer)
    gather = functools.partial(_gathered, torch.distributed.all_gather_into_tensor)
    with (
        mock.patch.object(model_utils, "nl", lightning),
        mock.patch.object(model_utils, "get_gpt_modelopt_spec", _layers, create=True),
        mock.patch.object(WrappedTorchNorm, "__new__", _norm),
        mock.patch.object(torch.distributed, "all_gather_into_tensor", gather),
    ):
        yield


def _trainer(**settings: Any) -> object:
    from nemo import lightning as nl

    trainer: Any = nl.Trainer
    return trainer(**settings | {"accelerator": "cpu"})


def _layers(config: GPTConfig, **_: object) -> ModuleSpec:
    """A dense layer whose norms are modules of their own, under the names that checkpoints have them by.

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
        raise RehearsalError("pruning a model with experts or latent attention is not rehearsed", "prune it on a GPU")
    of_heads = WrappedTorchNorm if config.qk_layernorm else IdentityOp
    attention: Any = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=DotProductAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=of_heads,
        k_layernorm=of_heads,
    )
    mlp: Any = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    add: Any = get_bias_dropout_add  # Megatron takes functions here and is typed for modules only
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


def _gathered(gather: Any, output: torch.Tensor, value: torch.Tensor, *args: Any, **kw: Any) -> object:
    """`all_gather_into_tensor`, also of a tensor without a dimension."""
    return gather(output, value.reshape(-1) if value.dim() == 0 else value, *args, **kw)


def _norm(_cls: type, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> torch.nn.Module:
    return _norm_class()(config, hidden_size, eps)


@functools.cache
def _norm_class() -> type[torch.nn.Module]:
    """The rehearsal's norm as one class, registered with ModelOpt, which knows modules by their class."""
    from modelopt.torch.nas.modules import _DynamicLayerNorm
    from modelopt.torch.nas.registry import DMRegistry
    from modelopt.torch.nas.traced_hp import TracedHp

    from superpod.rehearsal.patches.norms import norm_class

    plain = norm_class()

    class Narrower(_DynamicLayerNorm):
        """As ModelOpt's class for Transformer Engine's norms."""

        def _setup(self) -> None:
            module: Any = self
            module._register_hparam("num_features", TracedHp(list(range(1, module.weight.shape[-1] + 1))))
            for name, _ in list(module.named_parameters(recurse=False)):
                module._register_dynamic_attribute(name, module._cut_to_active_features)

    DMRegistry.register({plain: "superpod.rehearsal.patches.norms.Norm"})(Narrower)
    return plain
