"""What Megatron-FSDP, a precision-aware optimizer and one in host memory take for granted.

NeMo 2.7.3, Megatron-Core 0.15.3, Transformer Engine 2.9.
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


def first_weights(r: Reader) -> Iterator[Violation]:
    """Megatron-FSDP starts from random weights.

    NeMo reads the weights to start from in the format in which the run will save (MegatronStrategy.load_checkpoint):
    fsdp_dtensor, which no imported checkpoint has. Beside adapters it reads them before it has sharded the model.
    """
    if _is_fsdp(r) and r["resume.restore_config"] is not None:
        yield Violation(
            "fsdp_weights",
            "Megatron-FSDP cannot start from weights (resume.restore_config): NeMo 2.7.3 looks in them for "
            "fsdp_dtensor, the format of its own checkpoints, which no imported model has",
            "leave out with=fsdp (trainer.strategy.fsdp), and use "
            + options.next_step(_without_fsdp(r.partial), ("precision_aware", "offload_activations"), options.LAYOUT),
        )


def unoverlapped_gradients(r: Reader) -> Iterator[Violation]:
    """Megatron-FSDP that shards gradients and no parameters (ZeRO-2) reduces them beside the backward pass.

    MegatronFSDP.__init__ asserts it, and switches it on by itself for ZeRO-3 alone.
    """
    if not _is_fsdp(r) or r[SHARDS] != "optim_grads" or overlapping.overlaps(r, "overlap_grad_reduce"):
        return
    given = overlapping.callback(r)
    if given is not None and given.overlap_grad_reduce is None:
        why = (
            f"NeMo's {overlapping.CALLBACK} does not let it without data parallelism: {r.gpus} GPUs, "
            f"and tp x pp x cp is {r.gpus_per_replica}"
        )
    else:
        why = "overlap_grad_reduce is off"
    yield Violation(
        "zero2_overlap",
        f"{SHARDS}=optim_grads (ZeRO-2) of Megatron-FSDP reduces gradients beside the backward pass, and {why}",
        f"write {SHARDS}=optim_grads_params (ZeRO-3), as with=fsdp does",
    )


def sharded_fp32(r: Reader) -> Iterator[Violation]:
    """A gated MLP that Megatron-FSDP shards has 16-bit parameters.

    NeMo looks for `linear_fc1.weight` one module too deep where no Float16Module is around the model
    (MegatronStrategy._get_fsdp_dtensor_state_dict), at the first save.
    """
    gated = r["model.config.gated_linear_unit"]
    if _is_fsdp(r) and gated and configured_job.precision_of(r.partial) == "fp32":
        yield Violation(
            "fsdp_fp32",
            "Megatron-FSDP in FP32 with gated MLPs (model.config.gated_linear_unit) cannot be saved: NeMo 2.7.3 ends "
            "with `GPTModel has no attribute 'module'`",
            "train in bf16, or leave out with=fsdp",
        )


def sharded_fp16(r: Reader) -> Iterator[Violation]:
    """Megatron-FSDP trains in BF16.

    In FP16 Megatron divides the gradients of all parameters by the loss scale before a step, and takes for granted that
    a rank has one of each (DistributedOptimizer._collect_main_grad_data_for_unscaling). Of a parameter of which
    Megatron-FSDP gave a rank no part, it has none: the first step ends the run.
    """
    if _is_fsdp(r) and configured_job.precision_of(r.partial) == "fp16":
        yield Violation(
            "fsdp_fp16",
            "Megatron-FSDP in FP16 ends at the first step: Megatron-Core 0.15.3 looks for the gradient of every "
            "parameter on every rank, and a rank holds no part of some (`'NoneType' object has no attribute 'data'`)",
            "train in bf16, or leave out with=fsdp",
        )


def sharded_optimizer(r: Reader) -> Iterator[Violation]:
    """Megatron-FSDP is trained by Megatron's plain Adam on the GPU.

    A precision-aware optimizer reads gradients from `decoupled_grad`, which Megatron-FSDP sets only where its buffer
    has an attribute that nothing sets (param_and_grad_buffer.py:2456). The optimizer on the host copies gradients out
    of tensors, and those of Megatron-FSDP are DTensors (HybridDeviceOptimizer._set_sub_optimizer_grads).
    """
    if not _is_fsdp(r) or not r[PRECISE]:
        return
    if r["optim.config.optimizer_cpu_offload"]:
        option, end = "offload_optimizer", "the first step ends with `mixed torch.Tensor and DTensor`"
    else:
        option, end = "precision_aware", "the optimizer gets no gradients, and nothing is learnt, without a message"
    yield Violation(
        "fsdp_optimizer",
        f"Megatron-FSDP with {PRECISE}: in Megatron-Core 0.15.3 {end}",
        f"leave out with={option}, or with=fsdp",
    )


def parameter_remainders(r: Reader) -> Iterator[Violation]:
    """The 16 bits by which an FP32 parameter exceeds its BF16 one are resumed from.

    Transformer Engine's Adam keeps only those (store_param_remainders). The fully reshardable format saves them as
    FP32 numbers, and FusedAdam.set_scaled_state takes int16 alone.
    """
    reshardable = r["trainer.strategy.ckpt_optim_fully_reshardable"]
    keeps = r[PRECISE] and r["optim.config.store_param_remainders"] and not r["optim.config.optimizer_cpu_offload"]
    if reshardable and keeps and configured_job.precision_of(r.partial) not in ("fp16", "fp32"):
        yield Violation(
            "parameter_remainders",
            f"{PRECISE} with optim.config.store_param_remainders and "
            "trainer.strategy.ckpt_optim_fully_reshardable: no checkpoint of such a run can be resumed from, because "
            "the parameters' lower 16 bits are saved as FP32 and Transformer Engine takes int16 alone",
            "write optim.config.store_param_remainders=False (2 bytes a parameter more, sharded), or "
            "trainer.strategy.ckpt_optim_fully_reshardable=False",
        )


def offloaded_state(r: Reader) -> Iterator[Violation]:
    """An optimizer on the host can be saved.

    torch's Adam, which runs there, keeps `step` as a tensor of no dimension in each parameter's state; the default
    format asserts that each tensor is as long as the parameter (sharded_param_state_dp_reshardable), at the first save.
    """
    reshardable = r["trainer.strategy.ckpt_optim_fully_reshardable"]
    if r["optim.config.optimizer_cpu_offload"] and not reshardable:
        yield Violation(
            "offloaded_state",
            "optim.config.optimizer_cpu_offload is on, and trainer.strategy.ckpt_optim_fully_reshardable is "
            f"{reshardable}: Megatron-Core 0.15.3 fails to save an optimizer on the host in that format",
            "write trainer.strategy.ckpt_optim_fully_reshardable=True, as with=offload_optimizer does",
        )


def offloaded_fp32(r: Reader) -> Iterator[Violation]:
    """An optimizer on the host has BF16 or FP16 parameters.

    The distributed optimizer's shards of FP32 parameters are views, no leaves, and torch's optimizers refuse these
    (DistributedOptimizer._build_model_and_main_param_groups, HybridDeviceOptimizer.__init__), as the run starts.
    """
    if r["optim.config.optimizer_cpu_offload"] and configured_job.precision_of(r.partial) == "fp32":
        yield Violation(
            "offloaded_fp32",
            "optim.config.optimizer_cpu_offload is on and the parameters are FP32: Megatron-Core 0.15.3 ends with "
            "`can't optimize a non-leaf Tensor`",
            "train in bf16, or leave out with=offload_optimizer",
        )


def _without_fsdp(partial: run.Partial) -> run.Partial:
    """The configuration with its optimizer as recipes have it without FSDP: that of adapters is not sharded."""
    plain = copy.deepcopy(partial)
    plain.optim.config.use_distributed_optimizer = not getattr(plain, "peft", None)
    return plain


def _is_fsdp(r: Reader) -> bool:
    return bool(r["trainer.strategy.fsdp"] or r["trainer.strategy.ddp.use_megatron_fsdp"])


RULES = (
    first_weights,
    unoverlapped_gradients,
    sharded_fp32,
    sharded_fp16,
    sharded_optimizer,
    parameter_remainders,
    offloaded_state,
    offloaded_fp32,
)
"""All rules of this file."""
