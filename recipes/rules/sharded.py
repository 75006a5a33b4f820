"""What Megatron-FSDP and an optimizer in host memory take for granted (NeMo 2.7.3, Megatron-Core 0.15.3)."""

from __future__ import annotations

from collections.abc import Iterator

from superpod.planner.rules import Broken
from superpod.recipes.rules import configured_job
from superpod.recipes.rules.reading import Reader


def first_weights(r: Reader) -> Iterator[Broken]:
    """Megatron-FSDP starts from random weights.

    NeMo reads the weights to start from in the format in which the run will save (MegatronStrategy.load_checkpoint):
    fsdp_dtensor, which no imported checkpoint has. Beside adapters it reads them before it has sharded the model.
    """
    if _is_fsdp(r) and r["resume.restore_config"] is not None:
        yield Broken(
            "fsdp_weights",
            "Megatron-FSDP cannot start from weights (resume.restore_config): NeMo 2.7.3 looks in them for "
            "fsdp_dtensor, the format of its own checkpoints, which no imported model has",
            "fine-tune with the distributed optimizer: leave out with=fsdp (trainer.strategy.fsdp), and use "
            "with=precision_aware, or more tp, pp or cp, where memory is short",
        )


def sharded_fp32(r: Reader) -> Iterator[Broken]:
    """A gated MLP that Megatron-FSDP shards has 16-bit parameters.

    NeMo looks for `linear_fc1.weight` one module too deep where no Float16Module is around the model
    (MegatronStrategy._get_fsdp_dtensor_state_dict), at the first save.
    """
    gated = r["model.config.gated_linear_unit"]
    if _is_fsdp(r) and gated and configured_job.precision_of(r.partial) == "fp32":
        yield Broken(
            "fsdp_fp32",
            "Megatron-FSDP in FP32 with gated MLPs (model.config.gated_linear_unit) cannot be saved: NeMo 2.7.3 ends "
            "with `GPTModel has no attribute 'module'`",
            "train in bf16, or leave out with=fsdp",
        )


def offloaded_state(r: Reader) -> Iterator[Broken]:
    """An optimizer on the host can be saved.

    torch's Adam, which runs there, keeps `step` as a tensor of no dimension in each parameter's state; the default
    format asserts that each tensor is as long as the parameter (sharded_param_state_dp_reshardable), at the first save.
    """
    reshardable = r["trainer.strategy.ckpt_optim_fully_reshardable"]
    if r["optim.config.optimizer_cpu_offload"] and not reshardable:
        yield Broken(
            "offloaded_state",
            "optim.config.optimizer_cpu_offload is on, and trainer.strategy.ckpt_optim_fully_reshardable is "
            f"{reshardable}: Megatron-Core 0.15.3 fails to save an optimizer on the host in that format",
            "write trainer.strategy.ckpt_optim_fully_reshardable=True, as with=offload_optimizer does",
        )


def offloaded_fp32(r: Reader) -> Iterator[Broken]:
    """An optimizer on the host has BF16 or FP16 parameters.

    The distributed optimizer's shards of FP32 parameters are views, no leaves, and torch's optimizers refuse these
    (DistributedOptimizer._build_model_and_main_param_groups, HybridDeviceOptimizer.__init__), as the run starts.
    """
    if r["optim.config.optimizer_cpu_offload"] and configured_job.precision_of(r.partial) == "fp32":
        yield Broken(
            "offloaded_fp32",
            "optim.config.optimizer_cpu_offload is on and the parameters are FP32: Megatron-Core 0.15.3 ends with "
            "`can't optimize a non-leaf Tensor`",
            "train in bf16, or leave out with=offload_optimizer",
        )


def _is_fsdp(r: Reader) -> bool:
    return bool(r["trainer.strategy.fsdp"] or r["trainer.strategy.ddp.use_megatron_fsdp"])


RULES = (first_weights, sharded_fp32, offloaded_state, offloaded_fp32)
"""All rules of this file."""
