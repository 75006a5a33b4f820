"""Loads a NeMo checkpoint on one rank, for conversion, evaluation or generation.

The checkpoint of an adapter is loaded with its base model. Needs NeMo. On a machine without a GPU, the caller must
first apply the patches of a rehearsal.
"""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.errors import UserError
from superpod.weights.transfer import nemo_fixes

if TYPE_CHECKING:
    import torch
    from nemo.collections.llm import GPTConfig, GPTModel

ADAPTER = Path("weights") / "adapter_metadata.json"
"""File of an adapter's checkpoint with the path of the base model's checkpoint. Complete models have none."""


def find_base_checkpoint(checkpoint: Path) -> Path | None:
    """Return the base checkpoint of an adapter, None for other checkpoints. Raises UserError if it is missing."""
    file = checkpoint / ADAPTER
    if not file.is_file():
        return None
    try:
        base = Path(json.loads(file.read_bytes())["model_ckpt_path"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{file} is corrupt: it must contain the path of the adapter's base model",
            "`recipes ckpt list` shows which checkpoints are intact",
        ) from None
    if not (base / "weights").is_dir():
        raise UserError(f"{checkpoint} is an adapter of {base}, which does not exist", "restore the base model")
    return base


def load_model(checkpoint: Path, dtype: torch.dtype, *, gpu: bool = False) -> GPTModel:
    """Return the model of a checkpoint in `dtype`, with adapters applied but not merged.

    It is on the GPU if `gpu` is set, else in host memory. Megatron's parallel state of one rank stays initialized.
    """
    from nemo import lightning as nl
    from nemo.collections.llm.modelopt import set_modelopt_spec_if_exists_in_ckpt
    from nemo.lightning import io
    from nemo.lightning._strategy_lib import megatron_cpu_init_context
    from nemo.lightning.ckpt_utils import ckpt_to_context_subdir
    from nemo.lightning.io.pl import ckpt_to_weights_subdir

    unset_attention_backend()
    base = find_base_checkpoint(checkpoint)
    model: Any = io.load_context(ckpt_to_context_subdir(checkpoint), "model")
    adapter, model.model_transform = model.model_transform, None  # applied below, after the base model has its weights
    _reset_training_settings(model.config, dtype)
    set_modelopt_spec_if_exists_in_ckpt(model, str(base or checkpoint))
    strategy: Any = nl.MegatronStrategy(ddp="pytorch", setup_optimizers=False)
    trainer: Any = nl.Trainer(
        devices=1, accelerator="gpu" if gpu else "cpu", strategy=strategy, logger=False, enable_checkpointing=False
    )
    # Based on `ModelConnector.nemo_load` of NeMo 2.7.3, which cannot load an adapter with its base model.
    strategy.connect(model)
    strategy.setup_environment()
    with nullcontext() if gpu else megatron_cpu_init_context(model.config):
        model.configure_model()
    strategy.setup(trainer)
    strategy.load_checkpoint(base or checkpoint)
    model.trainer = trainer
    if base and adapter:
        adapter(model)
        weights = ckpt_to_weights_subdir(checkpoint, is_saving=False)
        metadata = strategy.unwrapped_checkpoint_io.load_content_metadata(weights)
        state = strategy.megatron_parallel.sharded_state_dict(metadata=metadata)
        adapters = {name: value for name, value in state.items() if ".adapter." in name}
        adapters = strategy.checkpoint_io.load_checkpoint(weights, sharded_state_dict=adapters)
        strategy.load_model_state_dict(adapters, strict=False)
    nemo_fixes.apply_fixes(unwrap_model(model))
    model.eval()
    return model


def unset_attention_backend() -> None:
    """Unset the variables of Transformer Engine's attention backend: Megatron rejects models with another backend."""
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)


def _reset_training_settings(config: GPTConfig, dtype: torch.dtype) -> None:
    """Set the dtype of a configuration, and reset its settings for training: layout, FP8, recompute."""
    import torch

    config.params_dtype = config.pipeline_dtype = config.autocast_dtype = dtype
    config.bf16, config.fp16 = dtype is torch.bfloat16, dtype is torch.float16
    config.fp8, config.fp8_param = None, False
    config.perform_initialization = False  # the weights come from the checkpoint
    config.recompute_granularity = None
    config.sequence_parallel = config.tp_comm_overlap = False
    config.pipeline_model_parallel_layout = None


def unwrap_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return Megatron's module inside the wrappers of Lightning and DDP."""
    inner: torch.nn.Module | None = model
    while inner is not None:
        model, inner = inner, getattr(inner, "module", None)
    return model


def merge_adapters(model: torch.nn.Module) -> int:
    """Merge every adapter into its matrix, in the dtype of the model, and return the number of matrices.

    LoRA: W + alpha / dim * B A (arXiv:2106.09685). DoRA then scales each row to its trained magnitude
    (arXiv:2402.09353). The adapter modules are not removed.

    Raises:
        UserError: an adapter is applied after a norm.
    """
    import torch
    from nemo.collections.llm.peft.dora import DoRALinear

    count = 0
    with torch.no_grad():
        for _, layer in find_adapted_layers(model):
            adapter = layer.adapter
            adapter_weight = adapter.alpha / adapter.dim * (adapter.linear_out.weight @ adapter.linear_in.weight)
            for weight in _get_matrices(layer.to_wrap):
                merged_weight = weight + adapter_weight
                if isinstance(layer, DoRALinear):
                    merged_weight *= (adapter.get_weight_magnitude() / merged_weight.norm(dim=1)).unsqueeze(1)
                weight.data = merged_weight
                count += 1
    return count


def find_adapted_layers(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """Return (name, layer) of each LoRALinear or DoRALinear of NeMo in a model.

    Raises:
        UserError: an adapter is applied after a norm, which a merged matrix cannot represent.
    """
    from nemo.collections.llm.peft.dora import DoRALinear
    from nemo.collections.llm.peft.lora import LoRALinear

    layers = [
        (name, layer)
        for name, layer in unwrap_model(model).named_modules()
        if isinstance(layer, (LoRALinear, DoRALinear))
    ]
    for name, layer in layers:
        if hasattr(layer.to_wrap, "post_layernorm"):
            raise UserError(
                f"the adapter of {name} was applied after the norm of NeMo's layer, norm(Wx) + BAx, which neither a "
                "merged matrix nor a PEFT adapter can represent",
                "train with peft.target_modules=['linear_qkv','linear_fc1'], as in the current recipes of this model; "
                "`generate` and `perplexity` can use this checkpoint",
            )
    return layers


def _get_matrices(linear: Any) -> list[torch.Tensor]:
    """Return the matrix of a linear layer, or the matrices of all experts in Transformer Engine's grouped layer."""
    if hasattr(linear, "weight"):
        return [linear.weight]
    return [getattr(linear, f"weight{number}") for number in range(linear.num_gemms)]


def get_base_state_dict(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a model without its adapters, by their names in the base model."""
    import torch

    tensors = unwrap_model(model).state_dict()
    return {
        name.replace(".to_wrap.", "."): value
        for name, value in tensors.items()
        if isinstance(value, torch.Tensor) and ".adapter." not in name and not name.endswith("_extra_state")
    }
