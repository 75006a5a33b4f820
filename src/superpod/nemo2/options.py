"""Options that apply to any recipe: `with=full_recompute` among the overrides, `options="fsdp"` in a factory.

Each option changes a few fields of the configuration, so that no recipe has to be copied for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from superpod.errors import UserError, did_you_mean

if TYPE_CHECKING:
    import nemo_run as run

PREFIX = "with="


@dataclass(frozen=True)
class Option:
    """A change of a recipe that users select with `with=NAME`."""

    about: str
    """One-line description."""
    change: Callable[[run.Partial], None]
    """Applies the option to a recipe, or raises UserError."""
    warning: str = ""
    """A drawback that users should know before they choose the option."""
    refusal: Callable[[run.Partial], str] = lambda partial: ""
    """Returns the reason why a recipe does not support the option; "" if it does."""
    instead: tuple[str, ...] = ()
    """Options with the same purpose; the error message suggests those that the recipe supports."""
    otherwise: str = ""
    """Another suggestion for the error message."""


def apply(partial: run.Partial, names: str) -> None:
    """Apply each of the comma-separated options to `partial`, in order.

    Raises:
        UserError: an option is unknown, conflicts with another, or is not supported by this recipe.
    """
    option_names = [name.strip() for name in names.split(",") if name.strip()]
    for one, other in CONFLICTS:
        if one in option_names and other in option_names:
            message = f"{one} and {other} cannot be combined: both determine how activations are stored"
            raise UserError(message, "choose one of them")
    for name in option_names:
        require_known(PREFIX + name)
        option = OPTIONS[name]
        reason = option.refusal(partial)
        if reason:
            raise UserError(f"{name} {reason}", suggest_options(partial, option.instead, option.otherwise))
        option.change(partial)


def suggest_options(partial: run.Partial, names: Iterable[str], fallback: str) -> str:
    """Return a hint with the options in `names` that this recipe supports, followed by `fallback`."""
    supported_options = [PREFIX + name for name in names if not OPTIONS[name].refusal(partial)]
    return ", or ".join(filter(None, [*supported_options, fallback]))


def require_known(text: str) -> None:
    """Check the option names in a `with=` override; other overrides are ignored.

    Raises:
        UserError: a name is empty or unknown.
    """
    if not text.startswith(PREFIX):
        return
    for name in map(str.strip, text.removeprefix(PREFIX).split(",")):
        if not name:
            raise UserError(f"{text!r} contains an empty option name", _list_options())
        if name not in OPTIONS:
            raise UserError(f"unknown option {name!r}", did_you_mean(name, list(OPTIONS)) or _list_options())


def warnings(overrides: Iterable[str]) -> list[str]:
    """Return the warnings of the options in the `with=` overrides, one line per option."""
    texts = [text.removeprefix(PREFIX) for text in overrides if text.startswith(PREFIX)]
    names = [name.strip() for text in texts for name in text.split(",")]
    return [f"with={name}: {OPTIONS[name].warning}" for name in names if name in OPTIONS and OPTIONS[name].warning]


def _list_options() -> str:
    return f"available options: {', '.join(OPTIONS)}"


def _refuse_adapters(partial: run.Partial) -> str:
    if getattr(partial, "peft", None):
        return "does not support adapters: recomputed layers get no gradient through frozen embeddings"
    return ""


def _recompute_fully(partial: run.Partial) -> None:
    config = partial.model.config
    config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "uniform", 1
    config.recompute_modules = None


def _offload_optimizer(partial: run.Partial) -> None:
    config = partial.optim.config
    config.optimizer_cpu_offload, config.optimizer_offload_fraction = True, 1.0
    config.overlap_cpu_optimizer_d2h_h2d = True
    config.use_precision_aware_optimizer = True  # Megatron requires it for its hybrid optimizer
    partial.trainer.strategy.ckpt_optim_fully_reshardable = True  # the default format cannot store the scalar `step`


def _refuse_unsharded_optimizer(partial: run.Partial) -> str:
    if partial.optim.config.use_distributed_optimizer:
        return ""
    return "needs the distributed optimizer, but this recipe does not shard its optimizer"


def _refuse_pipeline(partial: run.Partial) -> str:
    stages = partial.trainer.strategy.pipeline_model_parallel_size
    return f"needs a single pipeline stage, but this layout has {stages}" if stages > 1 else ""


def _offload_activations(partial: run.Partial) -> None:
    config = partial.model.config
    config.recompute_granularity = config.recompute_method = config.recompute_num_layers = None
    config.cpu_offloading, config.cpu_offloading_activations, config.cpu_offloading_weights = True, True, False
    # The backward pass starts with the last layer, so its activations stay on the GPU.
    config.cpu_offloading_num_layers = int(config.num_layers) - 1


def _use_fsdp(partial: run.Partial) -> None:
    from superpod.nemo2.build.layout import set_sharding

    set_sharding(partial, "zero3")


def _use_fp16(partial: run.Partial) -> None:
    from superpod.nemo2.build import precision

    plugin = partial.trainer.plugins
    if plugin.fp8 or plugin.precision != "bf16-mixed":
        current_precision = f"FP8 ({plugin.fp8_recipe})" if plugin.fp8 else plugin.precision
        raise UserError(f"fp16 replaces bf16, but this recipe trains in {current_precision}", "use the bf16 recipe")
    precision.apply(partial, "fp16")
    _disable_userbuffers(partial)  # NeMo always allocates them in BF16 (megatron_comm_overlap.py)


def _disable_userbuffers(partial: run.Partial) -> None:
    for callback in partial.trainer.callbacks:
        if hasattr(callback, "tp_comm_overlap"):
            callback.tp_comm_overlap = False


def _make_deterministic(partial: run.Partial) -> None:
    config = partial.model.config
    config.deterministic_mode = True
    config.cross_entropy_loss_fusion = False  # the fused kernel does not sum in a fixed order
    _disable_userbuffers(partial)  # their reductions do not sum in a fixed order either


def _use_cuda_graphs(partial: run.Partial) -> None:
    config = partial.model.config
    if getattr(config, "num_moe_experts", None):
        message = "cuda_graphs requires constant tensor shapes, but those of dropless experts change at every step"
        raise UserError(message, _list_options())
    for field, off in (("recompute_granularity", None), ("cpu_offloading", False)):
        value = getattr(config, field)
        if value:
            raise UserError(
                f"cuda_graphs captures entire layers, which Megatron-Core 0.15.3 does not support with {field}={value}",
                f"set model.config.{field}={off} before with=cuda_graphs if memory allows, or leave out cuda_graphs",
            )
    # Set cuda_graph_impl directly. enable_cuda_graph would set it too, but NeMo's strategy (_strategy_lib.py:175) runs
    # Megatron's check twice, and the second check rejects both fields together (megatron-core 0.15.3,
    # transformer_config.py:1373).
    config.cuda_graph_impl = "local"
    partial.trainer.strategy.use_te_rng_tracker = True  # its random states can be captured in a graph


def use_bf16_moments(partial: run.Partial) -> None:
    """Let a recipe's optimizer store Adam's moments in BF16."""
    import torch

    config = partial.optim.config
    config.use_precision_aware_optimizer = True
    config.exp_avg_dtype = config.exp_avg_sq_dtype = torch.bfloat16


def _replace_deepep(partial: run.Partial) -> None:
    if not remove_deepep(partial):
        raise UserError("alltoall replaces DeepEP, but this recipe does not use DeepEP", _list_options())


def remove_deepep(partial: run.Partial) -> bool:
    """Let a recipe dispatch tokens to experts with NCCL instead of DeepEP; return whether it used DeepEP."""
    callbacks = partial.trainer.callbacks
    other_callbacks = [c for c in callbacks if "DeepEPCallback" not in str(getattr(c, "__fn_or_cls__", ""))]
    partial.trainer.callbacks = other_callbacks
    config = partial.model.config
    if config.moe_token_dispatcher_type == "flex":
        config.moe_token_dispatcher_type, config.moe_enable_deepep = "alltoall", False
    return len(other_callbacks) < len(callbacks)


def _enable_straggler_detection(partial: run.Partial) -> None:
    import nemo_run as run
    from nvidia_resiliency_ext.ptl_resiliency import StragglerDetectionCallback

    partial.trainer.callbacks.append(
        run.Config(
            StragglerDetectionCallback,
            report_time_interval=300,  # s
            calc_relative_gpu_perf=True,
            calc_individual_gpu_perf=True,
            num_gpu_perf_scores_to_print=5,
            gpu_relative_perf_threshold=0.7,
            gpu_individual_perf_threshold=0.7,
            stop_if_detected=False,  # report a slow GPU, but continue
            enable_ptl_logging=True,
        )
    )


def _use_fault_tolerance(partial: run.Partial) -> None:
    import nemo_run as run
    from nvidia_resiliency_ext.ptl_resiliency import FaultToleranceCallback

    partial.trainer.callbacks.append(
        run.Config(
            FaultToleranceCallback,
            autoresume=False,  # each attempt checks the done marker of the run
            calculate_timeouts=True,  # from the second attempt on: five times the longest observed interval
        )
    )


def _set_environment_only(partial: run.Partial) -> None:
    """Do nothing: `facts/environment.py` sets environment variables of the ranks for the option."""


CONFLICTS = (("full_recompute", "offload_activations"),)
"""Options that exclude each other: Megatron does not support offloading of recomputed activations."""

MORE_PARALLELISM = "a larger tp, pp or cp if memory is short"
"""Suggestion for the error message of an option that saves memory."""

OPTIONS = {
    "full_recompute": Option(
        "recompute every layer: lowest memory, about a third more computation",
        _recompute_fully,
        refusal=_refuse_adapters,
        instead=("offload_activations",),
        otherwise=MORE_PARALLELISM,
    ),
    "offload_optimizer": Option(
        "optimizer step and optimizer states on the host",
        _offload_optimizer,
        refusal=_refuse_unsharded_optimizer,
        instead=("offload_activations",),
        otherwise=MORE_PARALLELISM,
    ),
    "offload_activations": Option(
        "activations stored on the host; single pipeline stage only",
        _offload_activations,
        refusal=_refuse_pipeline,
        instead=("full_recompute",),
        otherwise="a larger tp or cp if memory is short",
    ),
    "fsdp": Option(
        "Megatron-FSDP: parameters, gradients and optimizer states sharded over data parallelism", _use_fsdp
    ),
    "precision_aware": Option(
        "Adam's moments in BF16: saves 4 bytes per parameter, divided by the data-parallel size",
        use_bf16_moments,
        refusal=_refuse_unsharded_optimizer,
        instead=("offload_activations",),
        otherwise=MORE_PARALLELISM,
    ),
    "alltoall": Option("expert dispatch with NCCL, for images or nodes without DeepEP", _replace_deepep),
    "cuda_graphs": Option("CUDA graphs, for dense models limited by kernel launches", _use_cuda_graphs),
    "fp16": Option(
        "FP16 instead of BF16, with a loss scale of 1",
        _use_fp16,
        "NeMo 2.7.3 never scales the loss, so gradients below 6e-8 underflow; bf16 keeps them",
    ),
    "stragglers": Option("nvidia-resiliency-ext reports slow GPUs every 5 minutes", _enable_straggler_detection),
    "fault_tolerance": Option(
        "nvidia-resiliency-ext terminates ranks that hang, after timeouts that it calculates", _use_fault_tolerance
    ),
    "deterministic": Option("bitwise reproducible, but slower", _make_deterministic),
    "nccl_debug": Option("NCCL logs its topology and algorithms; RAS reports hung ranks", _set_environment_only),
    "nccl_simple_ring": Option(
        "force NCCL's ring algorithm and simple protocol",
        _set_environment_only,
        "slower for small messages and many nodes; use it for comparison only",
    ),
    "nccl_low_memory": Option(
        "NCCL with small buffers and at most 8 channels",
        _set_environment_only,
        "collectives may be slower: compare step times",
    ),
}
