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

from superpod.rehearsal.patches.optimizer import update
from superpod.rehearsal.patches.registry import patch, replace
from superpod.rehearsal.te import source

if TYPE_CHECKING:
    import torch

PACKAGE = "transformer_engine.pytorch.optimizers"


@cache
def load_adam_class() -> Any:
    """Load Transformer Engine's class FusedAdam, with its own states, data types and checkpoints.

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
def _provide_modules(**optimizers: Any) -> Iterator[None]:
    """Define the modules that fused_adam.py imports, within the block only.

    `optimizers`: attributes of the module `transformer_engine.pytorch.optimizers`.
    """
    kernels = {f"multi_tensor_adam{kind}": None for kind in ("_fp8", "_capturable", "_capturable_master")}
    contents: dict[str, dict[str, Any]] = {
        "transformer_engine": {},
        "transformer_engine.pytorch": {},
        "transformer_engine.pytorch.tensor": {},
        "transformer_engine.pytorch.tensor.float8_tensor": {
            "Float8Tensor": type("Float8Tensor", (), {}),
            "Float8Quantizer": type("Float8Quantizer", (), {}),
        },
        PACKAGE: optimizers,
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
    """Apply one Adam step to `lists`: gradients, parameters, first and second moments, and possibly FP32 parameters.

    Replaces TE's kernel multi_tensor_adam; `settings` are the arguments of `_parameter_group`.
    """
    gradients, parameters, first, second, *more = lists
    masters = more[0] if more else parameters
    group, decoupled = _parameter_group(*settings)
    for gradient, parameter, m, v, master in zip(gradients, parameters, first, second, masters, strict=True):
        exact_value = master if master.dtype is m.dtype else master.to(m.dtype)
        update(exact_value, gradient, {"exp_avg": m, "exp_avg_sq": v}, group, decoupled=decoupled)
        parameter.copy_(exact_value)


def _adam_with_remainders(_chunk: int, _overflow: Any, lists: list[list[torch.Tensor]], *settings: Any) -> None:
    """Apply one Adam step to FP32 parameters that are stored as BF16 parameters and a remainder of 16 bits.

    Replaces TE's kernel multi_tensor_adam_param_remainder (TE 2.9.0, multi_tensor/adam.cu).
    """
    group, decoupled = _parameter_group(*settings)
    for gradient, parameter, m, v, remainder in zip(*lists, strict=True):
        master = join(parameter, remainder)
        update(master, gradient, {"exp_avg": m, "exp_avg_sq": v}, group, decoupled=decoupled)
        split_into(parameter, remainder, master)


def _parameter_group(
    lr: float, beta1: float, beta2: float, eps: float, step: int, decoupled: int, corrects: int, decay: float
) -> tuple[dict[str, Any], bool]:
    """Return the optimizer's parameter group for the arguments of a kernel, and whether it is AdamW (`decoupled`)."""
    moments = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": decay}
    return moments | {"step": step, "bias_correction": bool(corrects)}, bool(decoupled)


def join(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the FP32 parameter of a BF16 parameter and the remainder, its lower 16 bits as int16.

    The BF16 parameter is rounded up if the remainder is negative.
    """
    import torch

    upper_bits = parameter.view(torch.int16).to(torch.int32) - (remainder < 0).to(torch.int32)
    lower = remainder.to(torch.int32) & 0xFFFF
    return (upper_bits << 16 | lower).view(torch.float32)


def split_into(parameter: torch.Tensor, remainder: torch.Tensor, master: torch.Tensor) -> None:
    """Write an FP32 parameter (`master`) to a BF16 parameter and its remainder: the inverse of `join`."""
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
        precise = self.use_precision_aware_optimizer and not self.optimizer_cpu_offload and source.is_installed()
        adam = load_adam_class() if precise else plain_adam
        for module in (optimizer, distrib_optimizer):
            replace(module, Adam=adam)
        with _provide_modules(FusedAdam=adam):
            original(self)

    replace(optimizer_config.OptimizerConfig, __post_init__=post_init)
    replace(optimizer_config, is_te_min_version=is_te_min_version)
    replace(optimizer, is_te_min_version=is_te_min_version)
