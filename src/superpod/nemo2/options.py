"""Variants that any recipe can have: `with=full_recompute` among the overrides, `options="fsdp"` in a factory.

Each changes a few fields of any recipe, so that no recipe is copied for it.
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
    """A variant: a line that describes it, and the function that changes a recipe."""

    about: str
    change: Callable[[run.Partial], None]
    warning: str = ""
    """What a user must know before they take it."""
    refusal: Callable[[run.Partial], str] = lambda partial: ""
    """Why a recipe cannot have it; "" = it can. `change` may refuse more, and names no other option then."""
    instead: tuple[str, ...] = ()
    """Options that serve the same end; those that the recipe can have are named where it is refused."""
    otherwise: str = ""
    """What else serves it."""


def apply(partial: run.Partial, names: str) -> None:
    """Change `partial` by each of the comma-separated options, in order.

    Raises:
        UserError: for an unknown name, or a recipe that cannot have the option.
    """
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for one, other in CONFLICTS:
        if one in chosen and other in chosen:
            raise UserError(
                f"{one} and {other} do not go together: both decide what happens to activations", "choose one"
            )
    for name in chosen:
        require_known(PREFIX + name)
        option = OPTIONS[name]
        if reason := option.refusal(partial):
            raise UserError(f"{name} {reason}", next_step(partial, option.instead, option.otherwise))
        option.change(partial)


def next_step(partial: run.Partial, names: Iterable[str], otherwise: str) -> str:
    """What to do instead: those of the options that this recipe can have, and `otherwise`."""
    possible = [PREFIX + name for name in names if not OPTIONS[name].refusal(partial)]
    return ", or ".join(filter(None, [*possible, otherwise]))


def require_known(text: str) -> None:
    """Refuse `with=` of an option that is none, or of no option; any other override passes.

    Raises:
        UserError: no option is called so.
    """
    names = text.removeprefix(PREFIX).split(",") if text.startswith(PREFIX) else []
    for name in map(str.strip, names):
        if not name:
            raise UserError(f"{text!r} has no option {'beside a comma' if len(names) > 1 else 'behind it'}", _all())
        if name not in OPTIONS:
            raise UserError(f"no option is called {name!r}", did_you_mean(name, list(OPTIONS)) or _all())


def warnings(overrides: Iterable[str]) -> list[str]:
    """What a user must know of the options among `overrides`, a line each."""
    texts = [text.removeprefix(PREFIX) for text in overrides if text.startswith(PREFIX)]
    names = [name.strip() for text in texts for name in text.split(",")]
    return [f"with={name}: {OPTIONS[name].warning}" for name in names if name in OPTIONS and OPTIONS[name].warning]


def _all() -> str:
    return f"the options are {', '.join(OPTIONS)}"


def _beside_adapters(partial: run.Partial) -> str:
    adapters = getattr(partial, "peft", None)
    return "does not work with adapters: frozen embeddings pass no gradient to recomputed layers" if adapters else ""


def _full_recompute(partial: run.Partial) -> None:
    config = partial.model.config
    config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "uniform", 1
    config.recompute_modules = None


def _offload_optimizer(partial: run.Partial) -> None:
    config = partial.optim.config
    config.optimizer_cpu_offload, config.optimizer_offload_fraction = True, 1.0
    config.overlap_cpu_optimizer_d2h_h2d = True
    config.use_precision_aware_optimizer = True  # Megatron's hybrid optimizer is only reached through it
    partial.trainer.strategy.ckpt_optim_fully_reshardable = True  # the other format has no place for its `step`


def _unsharded(partial: run.Partial) -> str:
    """That Megatron takes the option with the distributed optimizer alone."""
    if partial.optim.config.use_distributed_optimizer:
        return ""
    return "needs the distributed optimizer, and this recipe does not shard its optimizer"


def _several_stages(partial: run.Partial) -> str:
    stages = partial.trainer.strategy.pipeline_model_parallel_size
    return f"needs one pipeline stage, and this layout has {stages}" if stages > 1 else ""


def _offload_activations(partial: run.Partial) -> None:
    config = partial.model.config
    config.recompute_granularity = config.recompute_method = config.recompute_num_layers = None
    config.cpu_offloading, config.cpu_offloading_activations, config.cpu_offloading_weights = True, True, False
    config.cpu_offloading_num_layers = _layers(config) - 1  # the backward pass needs the last layer's at once


def _layers(config: run.Config) -> int:
    return int(config.num_layers)


def _fsdp(partial: run.Partial) -> None:
    from superpod.nemo2.build.layout import shard

    shard(partial, "zero3")


def _fp16(partial: run.Partial) -> None:
    from superpod.nemo2.build import precision

    plugin = partial.trainer.plugins
    if plugin.fp8 or plugin.precision != "bf16-mixed":
        now = f"FP8 ({plugin.fp8_recipe})" if plugin.fp8 else plugin.precision
        raise UserError(f"fp16 takes the place of bf16, and this recipe trains in {now}", "take its bf16 recipe")
    precision.apply(partial, "fp16")
    _without_userbuffers(partial)  # NeMo makes them for BF16, whatever the model is (megatron_comm_overlap.py)


def _without_userbuffers(partial: run.Partial) -> None:
    for callback in partial.trainer.callbacks:
        if hasattr(callback, "tp_comm_overlap"):
            callback.tp_comm_overlap = False


def _deterministic(partial: run.Partial) -> None:
    config = partial.model.config
    config.deterministic_mode = True
    config.cross_entropy_loss_fusion = False  # its kernel sums in no fixed order
    _without_userbuffers(partial)  # nor do their reductions


def _cuda_graphs(partial: run.Partial) -> None:
    config = partial.model.config
    if getattr(config, "num_moe_experts", None):
        raise UserError("cuda_graphs needs the same shapes in every step, and dropless experts change theirs", _all())
    if config.recompute_granularity or config.cpu_offloading:
        field, off = ("recompute_granularity", None) if config.recompute_granularity else ("cpu_offloading", False)
        raise UserError(
            f"cuda_graphs records whole layers, and Megatron-Core 0.15.3 refuses that with "
            f"{field}={getattr(config, field)}",
            f"model.config.{field}={off} before it, where memory allows; or no cuda_graphs",
        )
    # Not enable_cuda_graph: it sets this field, and NeMo's strategy (_strategy_lib.py:175) has Megatron check twice,
    # which then refuses the two together (megatron-core 0.15.3, transformer_config.py:1373).
    config.cuda_graph_impl = "local"
    partial.trainer.strategy.use_te_rng_tracker = True  # random states that a graph can hold


def _precision_aware(partial: run.Partial) -> None:
    import torch

    config = partial.optim.config
    config.use_precision_aware_optimizer = True
    config.exp_avg_dtype = config.exp_avg_sq_dtype = torch.bfloat16


def _alltoall(partial: run.Partial) -> None:
    kept = [c for c in partial.trainer.callbacks if "DeepEPCallback" not in str(getattr(c, "__fn_or_cls__", ""))]
    if len(kept) == len(partial.trainer.callbacks):
        raise UserError("alltoall takes DeepEP away, and this recipe does not use it", _all())
    partial.trainer.callbacks = kept


def _stragglers(partial: run.Partial) -> None:
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
            stop_if_detected=False,  # a slow run is better than one that stops at night
            enable_ptl_logging=True,
        )
    )


def _fault_tolerance(partial: run.Partial) -> None:
    import nemo_run as run
    from nvidia_resiliency_ext.ptl_resiliency import FaultToleranceCallback

    partial.trainer.callbacks.append(
        run.Config(
            FaultToleranceCallback,
            autoresume=False,  # an attempt sees by the run's done marker whether to continue
            calculate_timeouts=True,  # five times the longest wait seen, from the second attempt on
        )
    )


def _environment_only(partial: run.Partial) -> None:
    """Nothing of the configuration: `facts/environment.py` gives the ranks their variables."""


CONFLICTS = (("full_recompute", "offload_activations"),)
"""Options that undo each other; Megatron refuses to offload what it recomputes."""

LAYOUT = "more tp, pp or cp, where memory is short"

OPTIONS = {
    "full_recompute": Option(
        "recompute every layer: least memory, about a third more work",
        _full_recompute,
        refusal=_beside_adapters,
        instead=("offload_activations",),
        otherwise=LAYOUT,
    ),
    "offload_optimizer": Option(
        "the optimizer step and its states on the host",
        _offload_optimizer,
        refusal=_unsharded,
        instead=("offload_activations",),
        otherwise=LAYOUT,
    ),
    "offload_activations": Option(
        "activations kept on the host; one pipeline stage only",
        _offload_activations,
        refusal=_several_stages,
        instead=("full_recompute",),
        otherwise="more tp or cp, where memory is short",
    ),
    "fsdp": Option("Megatron-FSDP: parameters, gradients and optimizer sharded over data parallelism", _fsdp),
    "precision_aware": Option(
        "Adam's moments in BF16: 8 bytes a parameter less, sharded",
        _precision_aware,
        refusal=_unsharded,
        instead=("offload_activations",),
        otherwise=LAYOUT,
    ),
    "alltoall": Option("experts' tokens by NCCL, where an image or its nodes have no DeepEP", _alltoall),
    "cuda_graphs": Option("launches recorded once; dense models, where the CPU cannot keep up", _cuda_graphs),
    "fp16": Option(
        "FP16 in place of BF16, with a loss scale of 1",
        _fp16,
        "NeMo 2.7.3 never multiplies the loss by a scale, so gradients below 6e-8 are lost; bf16 loses none",
    ),
    "stragglers": Option("nvidia-resiliency-ext names slow GPUs every 5 minutes", _stragglers),
    "fault_tolerance": Option(
        "nvidia-resiliency-ext ends a rank that hangs, by timeouts that it learns", _fault_tolerance
    ),
    "deterministic": Option("bitwise repeatable, and slower", _deterministic),
    "nccl_debug": Option("NCCL says what it finds and chooses, and RAS which ranks hang", _environment_only),
    "nccl_simple_ring": Option(
        "NCCL's ring and simple protocol forced",
        _environment_only,
        "slower for small messages and many nodes: to compare",
    ),
    "nccl_low_memory": Option(
        "NCCL with small buffers and at most 8 channels",
        _environment_only,
        "collectives may be slower: compare the steps",
    ),
}
