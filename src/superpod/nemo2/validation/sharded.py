"""Check the requirements of Megatron-FSDP, precision-aware optimizers and optimizers in host memory.

They apply to NeMo 2.7.3, Megatron-Core 0.15.3 and Transformer Engine 2.9.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING

from superpod.nemo2 import options
from superpod.nemo2.validation import configured_job, overlapping
from superpod.nemo2.validation.reading import Reader
from superpod.planner.rules.rules import Violation

if TYPE_CHECKING:
    import nemo_run as run

PRECISE = "optim.config.use_precision_aware_optimizer"
SHARDS = "trainer.strategy.ddp.data_parallel_sharding_strategy"


def check_fsdp_weights(r: Reader) -> Iterator[Violation]:
    """Yield a violation for Megatron-FSDP with initial weights: it can start only from random weights.

    NeMo expects initial weights in the format in which the run saves (MegatronStrategy.load_checkpoint), fsdp_dtensor,
    but imported checkpoints have a different format. With adapters, it loads them before it shards the model.
    """
    if _is_fsdp(r) and r["resume.restore_config"] is not None:
        yield Violation(
            "fsdp_weights",
            "Megatron-FSDP cannot start from weights (resume.restore_config): NeMo 2.7.3 expects them in the format "
            "fsdp_dtensor, which imported models do not have",
            f"leave out with=fsdp (trainer.strategy.fsdp), and use {_suggest_instead_of_fsdp(r.partial)}",
        )


def check_zero2_overlap(r: Reader) -> Iterator[Violation]:
    """Yield a violation for ZeRO-2 of Megatron-FSDP if gradient reduction does not overlap with the backward pass.

    MegatronFSDP.__init__ asserts this; for ZeRO-3, it enables the overlap.
    """
    if not _is_fsdp(r) or r[SHARDS] != "optim_grads" or overlapping.is_overlapped(r, "overlap_grad_reduce"):
        return
    callback = overlapping.find_callback(r)
    if callback is not None and callback.overlap_grad_reduce is None:
        cause = (
            f"NeMo's {overlapping.CALLBACK} disables it without data parallelism: {r.gpus} GPUs, tp x pp x cp = "
            f"{r.gpus_per_replica}"
        )
    else:
        cause = "overlap_grad_reduce is False"
    yield Violation(
        "zero2_overlap",
        f"{SHARDS}=optim_grads (ZeRO-2) of Megatron-FSDP needs overlapped gradient reduction, but {cause}",
        f"set {SHARDS}=optim_grads_params (ZeRO-3), as with=fsdp does",
    )


def check_fsdp_fp32(r: Reader) -> Iterator[Violation]:
    """Yield a violation for Megatron-FSDP with FP32 parameters and gated MLPs.

    If the model is not wrapped in a Float16Module, NeMo looks for `linear_fc1.weight` one module too deep at the first
    save (MegatronStrategy._get_fsdp_dtensor_state_dict).
    """
    gated = r["model.config.gated_linear_unit"]
    if _is_fsdp(r) and gated and configured_job.read_precision(r.partial) == "fp32":
        yield Violation(
            "fsdp_fp32",
            "Megatron-FSDP in FP32 with gated MLPs (model.config.gated_linear_unit) cannot be saved: NeMo 2.7.3 fails "
            "with `GPTModel has no attribute 'module'`",
            "train in bf16, or leave out with=fsdp",
        )


def check_fsdp_fp16(r: Reader) -> Iterator[Violation]:
    """Yield a violation for Megatron-FSDP in FP16.

    In FP16, Megatron divides the gradients of all parameters by the loss scale before a step, and assumes that every
    rank has a gradient of each (DistributedOptimizer._collect_main_grad_data_for_unscaling). A rank without a shard of
    a parameter has no gradient of it, so the first step fails.
    """
    if _is_fsdp(r) and configured_job.read_precision(r.partial) == "fp16":
        yield Violation(
            "fsdp_fp16",
            "Megatron-FSDP in FP16 fails at the first step (`'NoneType' object has no attribute 'data'`): "
            "Megatron-Core 0.15.3 expects a gradient of every parameter on every rank, but some ranks lack its shard",
            "train in bf16, or leave out with=fsdp",
        )


def check_fsdp_optimizer(r: Reader) -> Iterator[Violation]:
    """Yield a violation for Megatron-FSDP with an optimizer other than Megatron's plain Adam on the GPU.

    A precision-aware optimizer reads gradients from `decoupled_grad`, which Megatron-FSDP sets only if its buffer has
    an attribute that nothing sets (param_and_grad_buffer.py:2456). An optimizer on the host copies gradients from
    tensors, but those of Megatron-FSDP are DTensors (HybridDeviceOptimizer._set_sub_optimizer_grads).
    """
    if not _is_fsdp(r) or not r[PRECISE]:
        return
    if r["optim.config.optimizer_cpu_offload"]:
        option, effect = "offload_optimizer", "the first step fails with `mixed torch.Tensor and DTensor`"
    else:
        option, effect = "precision_aware", "the optimizer gets no gradients, so the weights never change"
    yield Violation(
        "fsdp_optimizer",
        f"Megatron-FSDP with {PRECISE}: in Megatron-Core 0.15.3, {effect}",
        f"leave out with={option}, or with=fsdp",
    )


def check_parameter_remainders(r: Reader) -> Iterator[Violation]:
    """Yield a violation for parameter remainders in the fully reshardable checkpoint format.

    With store_param_remainders, Transformer Engine's Adam keeps only the lower 16 bits of its FP32 parameters. The
    format saves them as FP32 numbers, but FusedAdam.set_scaled_state accepts int16 only.
    """
    stores_remainders = r[PRECISE] and r["optim.config.store_param_remainders"]
    stores_remainders = stores_remainders and not r["optim.config.optimizer_cpu_offload"]
    is_reshardable = r["trainer.strategy.ckpt_optim_fully_reshardable"]
    if is_reshardable and stores_remainders and configured_job.read_precision(r.partial) not in ("fp16", "fp32"):
        yield Violation(
            "parameter_remainders",
            f"{PRECISE} with optim.config.store_param_remainders and "
            "trainer.strategy.ckpt_optim_fully_reshardable: the run could not resume, because the lower 16 bits of the "
            "parameters are saved as FP32, but Transformer Engine accepts int16 only",
            "set optim.config.store_param_remainders=False (2 more bytes per parameter, sharded), or "
            "trainer.strategy.ckpt_optim_fully_reshardable=False",
        )


def check_offloaded_state(r: Reader) -> Iterator[Violation]:
    """Yield a violation for an optimizer on the host unless checkpoints are in the fully reshardable format.

    torch's Adam, which runs on the host, stores `step` as a 0-dimensional tensor per parameter. At the first save, the
    default format asserts that each tensor has the size of its parameter (sharded_param_state_dp_reshardable).
    """
    reshardable = r["trainer.strategy.ckpt_optim_fully_reshardable"]
    if r["optim.config.optimizer_cpu_offload"] and not reshardable:
        yield Violation(
            "offloaded_state",
            "optim.config.optimizer_cpu_offload is True, but trainer.strategy.ckpt_optim_fully_reshardable is "
            f"{reshardable}: Megatron-Core 0.15.3 cannot save an optimizer on the host in that format",
            "set trainer.strategy.ckpt_optim_fully_reshardable=True, as with=offload_optimizer does",
        )


def check_offloaded_fp32(r: Reader) -> Iterator[Violation]:
    """Yield a violation for an optimizer on the host with FP32 parameters.

    In the distributed optimizer, shards of FP32 parameters are views, not leaf tensors, so torch cannot optimize
    them (DistributedOptimizer._build_model_and_main_param_groups, HybridDeviceOptimizer.__init__).
    """
    if r["optim.config.optimizer_cpu_offload"] and configured_job.read_precision(r.partial) == "fp32":
        yield Violation(
            "offloaded_fp32",
            "optim.config.optimizer_cpu_offload is True, but the parameters are FP32: Megatron-Core 0.15.3 fails with "
            "`can't optimize a non-leaf Tensor`",
            "train in bf16, or leave out with=offload_optimizer",
        )


def _suggest_instead_of_fsdp(partial: run.Partial) -> str:
    """Return a hint with the options that a recipe supports without FSDP."""
    without_fsdp = copy.deepcopy(partial)
    without_fsdp.optim.config.use_distributed_optimizer = not getattr(partial, "peft", None)
    names = ("precision_aware", "offload_activations")
    return options.suggest_options(without_fsdp, names, options.MORE_PARALLELISM)


def _is_fsdp(r: Reader) -> bool:
    return bool(r["trainer.strategy.fsdp"] or r["trainer.strategy.ddp.use_megatron_fsdp"])


RULES = (
    check_fsdp_weights,
    check_zero2_overlap,
    check_fsdp_fp32,
    check_fsdp_fp16,
    check_fsdp_optimizer,
    check_parameter_remainders,
    check_offloaded_state,
    check_offloaded_fp32,
)
