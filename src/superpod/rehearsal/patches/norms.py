"""Replaces Megatron-Core's torch norm (transformer/torch_norm.py) by one with TE's parameter names and attributes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from superpod.rehearsal.patches.registry import patch, replace

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig


@patch(
    "torch-norm",
    target="megatron.core.transformer.torch_norm.WrappedTorchNorm",
    reason="Megatron's torch norm supports neither sequence parallelism nor zero-centered weights; TE's norm, which a "
    "GPU run uses, sets an attribute of its weights, so that gradients are summed over the tensor-parallel ranks",
)
def _patch_torch_norm() -> None:
    from megatron.core.transformer.torch_norm import L2Norm, WrappedTorchNorm

    def new(_cls: type, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> torch.nn.Module:
        if config.normalization == "L2Norm":
            return L2Norm(hidden_size, eps)
        return create_norm_class()(config, hidden_size, eps)

    replace(WrappedTorchNorm, __new__=new)


def create_norm_class() -> type[torch.nn.Module]:
    """Create a norm class with TE's parameter names and attributes: ``weight`` and, for LayerNorm, ``bias``."""
    import torch

    class Norm(torch.nn.Module):
        weight: torch.Tensor

        def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
            super().__init__()
            self.config, self.eps = config, eps
            add_norm_parameters(self, config, hidden_size, prefix="")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return normalize(x, self.config, self.eps, self.weight, getattr(self, "bias", None))

    return Norm


def add_norm_parameters(module: torch.nn.Module, config: TransformerConfig, hidden_size: int, *, prefix: str) -> None:
    """Add the parameters of a norm to ``module``, with TE's attributes and names after ``prefix``."""
    import torch

    fill = torch.zeros if config.layernorm_zero_centered_gamma else torch.ones
    names = {"weight": fill} if config.normalization == "RMSNorm" else {"weight": fill, "bias": torch.zeros}
    for name, make in names.items():
        parameter: Any = torch.nn.Parameter(make(hidden_size, dtype=config.params_dtype))
        parameter.sequence_parallel = config.sequence_parallel  # Megatron sums the gradient over TP where it is set
        setattr(module, prefix + name, parameter)


def normalize(
    x: torch.Tensor, config: TransformerConfig, eps: float, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Apply RMSNorm or LayerNorm (``config.normalization``) to the last dimension of ``x``."""
    import torch.nn.functional as F

    if config.layernorm_zero_centered_gamma:
        weight = weight + 1
    if config.normalization == "RMSNorm":
        return F.rms_norm(x, (x.size(-1),), weight, eps)
    return F.layer_norm(x, (x.size(-1),), weight, bias, eps)
