"""Switches off the settings of a TransformerConfig that need a GPU, and records them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from superpod.rehearsal.patches.registry import patch, replace

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig
    from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback

_FUSED = "a fused CUDA kernel"
_TE = "needs Transformer Engine"
_GRAPH = "CUDA graphs"
_FP8 = "FP8 and FP4 need tensor cores: the rehearsal computes in bf16"

# Field of TransformerConfig: (its value in a rehearsal, reason).
GPU_ONLY: dict[str, tuple[str | bool | None, str]] = {
    "apply_rope_fusion": (False, _FUSED),
    "masked_softmax_fusion": (False, _FUSED),
    "persist_layer_norm": (False, _FUSED),
    "gradient_accumulation_fusion": (False, _FUSED),
    "cross_entropy_loss_fusion": (False, _FUSED),
    "fused_single_qkv_rope": (False, _FUSED),
    "moe_permute_fusion": (False, _FUSED),
    "moe_router_fusion": (False, _FUSED),
    "moe_grouped_gemm": (False, "grouped GEMM is a CUDA kernel; replaced by one GEMM per expert"),
    "bias_activation_fusion": (False, "torch.compile would compile C++ for minutes"),
    "bias_dropout_fusion": (False, "torch.compile would compile C++ for minutes"),
    "defer_embedding_wgrad_compute": (False, "needs gradient_accumulation_fusion"),
    "tp_comm_overlap": (False, "userbuffers are in GPU memory"),
    "enable_cuda_graph": (False, _GRAPH),
    "external_cuda_graph": (False, _GRAPH),
    "cuda_graph_impl": ("none", _GRAPH),
    "fp8": (None, _FP8),
    "fp8_param": (False, _FP8),
    "fp4": (None, _FP8),
    "fp4_param": (False, _FP8),
    "moe_router_padding_for_fp8": (False, _FP8),
    "delay_wgrad_compute": (False, _TE),
    "use_te_rng_tracker": (False, _TE),
    "use_te_activation_func": (False, _TE),
    "use_transformer_engine_full_layer_spec": (False, _TE),
    "cpu_offloading": (False, "offloads from GPU memory"),
    "moe_enable_deepep": (False, "DeepEP is a CUDA library"),
}

dropped: dict[str, object] = {}
"""Settings that this process has switched off: {field: the recipe's value}."""


def switch_off_gpu_only(config: TransformerConfig) -> None:
    """Set the GPU-only fields of a TransformerConfig to the values in ``GPU_ONLY``, and record them in ``dropped``."""
    for name, (neutral, _) in GPU_ONLY.items():
        _switch_off(config, name, neutral)
    if config.moe_token_dispatcher_type == "flex":  # DeepEP's dispatcher
        _switch_off(config, "moe_token_dispatcher_type", "alltoall")
    modules = config.recompute_modules or []
    if "moe_act" in modules:  # Megatron supports its recomputation only with grouped GEMM
        _switch_off(config, "recompute_modules", [name for name in modules if name != "moe_act"])


def _switch_off(config: TransformerConfig, name: str, neutral: object) -> None:
    """Set a field to its value in a rehearsal; if the recipe's value differs, record it in ``dropped``."""
    value = getattr(config, name, neutral)
    if value not in (neutral, None):
        dropped[name] = value
        setattr(config, name, neutral)


@patch(
    "gpu-settings",
    target="megatron.core TransformerConfig.__post_init__",
    reason="recipes request kernels that need a GPU; the rehearsal lists everything that it switches off",
)
def _patch_gpu_settings() -> None:
    _run_before_post_init(switch_off_gpu_only)


@patch(
    "pipeline-outputs",
    target="megatron.core TransformerConfig.deallocate_pipeline_outputs",
    reason="a stage frees its output after passing it to NCCL, but gloo may not have sent it yet: the losses would be "
    "silently wrong",
)
def _patch_pipeline_outputs() -> None:
    _run_before_post_init(lambda config: _switch_off(config, "deallocate_pipeline_outputs", False))


def _run_before_post_init(change: Callable[[TransformerConfig], None]) -> None:
    """Patch TransformerConfig so that `change` is called with each new configuration before Megatron checks it."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    original = TransformerConfig.__post_init__

    def post_init(self: TransformerConfig) -> None:
        change(self)
        original(self)

    replace(TransformerConfig, __post_init__=post_init)


@patch(
    "gpu-settings-late",
    target="nemo: MegatronCommOverlapCallback._apply_cfgs",
    reason="the overlap callback writes GPU-only settings into a configuration that has already been built",
)
def _patch_gpu_settings_late() -> None:
    import nemo.collections.llm  # noqa: F401 - first, because the module of the callback has a circular import
    from megatron.core.transformer.transformer_config import TransformerConfig
    from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback

    original = MegatronCommOverlapCallback._apply_cfgs

    def apply(self: MegatronCommOverlapCallback, source: object, target: object) -> None:
        original(self, source, target)
        if isinstance(target, TransformerConfig):
            switch_off_gpu_only(target)

    replace(MegatronCommOverlapCallback, _apply_cfgs=apply)
