"""Provides Transformer Engine's FusedAdam for the precision-aware optimizer, with kernels in plain torch."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from superpod.errors import UserError
from superpod.rehearsal.patches.optimizer import update
from superpod.rehearsal.patches.registry import patch, replace
from superpod.rehearsal.te import source

if TYPE_CHECKING:
    import torch

PACKAGE = "transformer_engine.pytorch.optimizers"


def is_available() -> bool:
    """Return whether Transformer Engine's Python package is installed."""
    try:
        source.find_folder()
    except UserError:
        return False
    return True


@cache
def adam_class() -> Any:
    """Return Transformer Engine's FusedAdam, with its own states, data types and checkpoints.

    Raises:
        UserError: Transformer Engine's Python package is not installed.
    """
    with _provide_modules():
        for name in ("multi_tensor_apply", "fused_adam"):
            file = source.find_folder() / "transformer_engine" / "pytorch" / "optimizers" / f"{name}.py"
            spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{name}", file)
            assert spec
            assert spec.loader
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        return sys.modules[f"{PACKAGE}.fused_adam"].FusedAdam


@contextmanager
def _provide_modules(**of_optimizers: Any) -> Iterator[None]:
    """Provide the modules that fused_adam.py imports, within the block only."""
    kernels = {f"multi_tensor_adam{kind}": None for kind in ("_fp8", "_capturable", "_capturable_master")}
    contents: dict[str, dict[str, Any]] = {
        "transformer_engine": {},
        "transformer_engine.pytorch": {},
        "transformer_engine.pytorch.tensor": {},
        "transformer_engine.pytorch.tensor.float8_tensor": {
            "Float8Tensor": type("Float8Tensor", (), {}),
            "Float8Quantizer": type("Float8Quantizer", (), {}),
        },
        PACKAGE: of_optimizers,
        "transformer_engine_torch": {
            **kernels,
            "multi_tensor_adam": _adam,
            "multi_tensor_adam_param_remainder": _adam_with_remainders,
            "DType": SimpleNamespace(kFloat32=0),
        },
    }
    modules = {name: ModuleType(name) for name in contents}
    for name, content in contents.items():
        modules[name].__dict__.update(content)
        modules[name].__path__ = []
    with mock.patch.dict(sys.modules, modules):
        yield


def _adam(_chunk: int, _overflow: Any, lists: list[list[torch.Tensor]], *settings: Any) -> None:
    """Apply one step to [gradients, parameters, first moments, second moments] and, if given, FP32 parameters."""
    gradients, parameters, first, second, *more = lists
    masters = more[0] if more else parameters
    group, decoupled = _parameter_group(*settings)
    for gradient, parameter, m, v, master in zip(gradients, parameters, first, second, masters, strict=True):
        exact_value = master if master.dtype is m.dtype else master.to(m.dtype)
        update(exact_value, gradient, {"exp_avg": m, "exp_avg_sq": v}, group, decoupled=decoupled)
        parameter.copy_(exact_value)


def _adam_with_remainders(_chunk: int, _overflow: Any, lists: list[list[torch.Tensor]], *settings: Any) -> None:
    """Apply `_adam` to FP32 parameters that are stored as BF16 and 16 more bits (TE 2.9.0, multi_tensor/adam.cu)."""
    group, decoupled = _parameter_group(*settings)
    for gradient, parameter, m, v, remainder in zip(*lists, strict=True):
        master = join(parameter, remainder)
        update(master, gradient, {"exp_avg": m, "exp_avg_sq": v}, group, decoupled=decoupled)
        split_into(parameter, remainder, master)


def _parameter_group(
    lr: float, beta1: float, beta2: float, eps: float, step: int, decoupled: int, corrects: int, decay: float
) -> tuple[dict[str, Any], bool]:
    """Return the parameter group for the settings of a kernel, and whether the weights decay directly."""
    moments = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": decay}
    return moments | {"step": step, "bias_correction": bool(corrects)}, bool(decoupled)


def join(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Join an FP32 parameter from BF16 (upper 16 bits, rounded up if the remainder is negative) and the remainder."""
    import torch

    upper_bits = parameter.view(torch.int16).to(torch.int32) - (remainder < 0).to(torch.int32)
    lower = remainder.to(torch.int32) & 0xFFFF
    return (upper_bits << 16 | lower).view(torch.float32)


def split_into(parameter: torch.Tensor, remainder: torch.Tensor, master: torch.Tensor) -> None:
    """Split an FP32 parameter into its two halves: the inverse of `join`."""
    import torch

    bits = master.view(torch.int32)
    remainder.copy_((bits << 16 >> 16).to(torch.int16))
    upper_bits = (bits >> 16) + (remainder < 0).to(torch.int32)
    parameter.view(torch.int16).copy_(upper_bits.to(torch.int16))


@patch(
    "te-adam",
    target="megatron.core.optimizer: Adam, is_te_min_version; OptimizerConfig.__post_init__",
    reason="the precision-aware optimizer requires Transformer Engine's FusedAdam, whose Python needs no GPU: its "
    "states and checkpoints are real, and only its kernels are replaced by torch; without TE, megatron-core 0.15.3 "
    "raises a TypeError when it compares versions",
)
def _patch_te_adam() -> None:
    import megatron.core.optimizer as optimizer
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    original = optimizer_config.OptimizerConfig.__post_init__
    plain_adam = optimizer.Adam

    def is_te_min_version(version: str, check_equality: bool = True) -> bool:
        return optimizer.Adam is not plain_adam

    def post_init(self: Any) -> None:
        precise = self.use_precision_aware_optimizer and not self.optimizer_cpu_offload and is_available()
        adam = adam_class() if precise else plain_adam
        for module in (optimizer, distrib_optimizer):
            replace(module, Adam=adam)
        with _provide_modules(FusedAdam=adam):
            original(self)

    replace(optimizer_config.OptimizerConfig, __post_init__=post_init)
    replace(optimizer_config, is_te_min_version=is_te_min_version)
    replace(optimizer, is_te_min_version=is_te_min_version)
