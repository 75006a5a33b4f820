"""A NeMo checkpoint as one model in one process, an adapter's on its base: to convert it, to ask it, to judge it.

Needs NeMo. On a machine without a GPU the caller has installed the rehearsal's patches.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from superpod.errors import UserError

ADAPTER = Path("weights") / "adapter_metadata.json"
"""What tells an adapter's checkpoint from a whole model's; it names the base."""


def base_of(checkpoint: Path) -> Path | None:
    """The checkpoint that an adapter's stands on; None for a whole model. Imports nothing.

    Raises:
        UserError: the base is not there any more.
    """
    file = checkpoint / ADAPTER
    if not file.is_file():
        return None
    try:
        base = Path(json.loads(file.read_bytes())["model_ckpt_path"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{file} is damaged: it names the model that the adapter is of",
            "`recipes ckpt list` says which checkpoints are whole",
        ) from None
    if not (base / "weights").is_dir():
        raise UserError(f"{checkpoint} is an adapter of {base}, which is not there", "put the base model back")
    return base


def load(checkpoint: Path, dtype: Any, *, gpu: bool = False) -> Any:
    """The LightningModule of a checkpoint, whole, in `dtype` on one rank, adapters applied and not merged.

    The process gets a Megatron world of one rank, which stays. In the host's memory unless `gpu`.
    """
    from nemo import lightning as nl
    from nemo.collections.llm.modelopt import set_modelopt_spec_if_exists_in_ckpt
    from nemo.lightning import io
    from nemo.lightning._strategy_lib import megatron_cpu_init_context
    from nemo.lightning.ckpt_utils import ckpt_to_context_subdir
    from nemo.lightning.io.pl import ckpt_to_weights_subdir

    base = base_of(checkpoint)
    model: Any = io.load_context(ckpt_to_context_subdir(checkpoint), "model")
    adapter, model.model_transform = model.model_transform, None
    _plain(model.config, dtype)
    set_modelopt_spec_if_exists_in_ckpt(model, str(base or checkpoint))
    strategy: Any = nl.MegatronStrategy(ddp="pytorch", setup_optimizers=False)
    trainer: Any = nl.Trainer(
        devices=1, accelerator="gpu" if gpu else "cpu", strategy=strategy, logger=False, enable_checkpointing=False
    )
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
        mine = {name: value for name, value in state.items() if ".adapter." in name}
        found = strategy.checkpoint_io.load_checkpoint(weights, sharded_state_dict=mine)
        strategy.load_model_state_dict(found, strict=False)
    model.eval()
    return model


def _plain(config: Any, dtype: Any) -> None:
    """One rank, no training: what the recipe set for its layout, its speed and its memory is off."""
    import torch

    config.params_dtype = config.pipeline_dtype = config.autocast_dtype = dtype
    config.bf16, config.fp16 = dtype is torch.bfloat16, dtype is torch.float16
    config.fp8, config.fp8_param = None, False
    config.perform_initialization = False
    config.recompute_granularity = None
    config.sequence_parallel = config.tp_comm_overlap = False
    config.pipeline_model_parallel_layout = None


def core(model: Any) -> Any:
    """Megatron's own module within Lightning's and DDP's wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


def merge(model: Any) -> int:
    """Add every adapter to the matrix it stands beside, in the model's own precision; returns how many matrices.

    DoRA's directions are scaled by its magnitudes. The adapters stay, as nothing.
    """
    import torch
    from nemo.collections.llm.peft.dora import DoRALinear
    from nemo.collections.llm.peft.lora import LoRALinear

    count = 0
    with torch.no_grad():
        adapted: list[Any] = [each for each in core(model).modules() if isinstance(each, (LoRALinear, DoRALinear))]
        for layer in adapted:
            adapter = layer.adapter
            added = adapter.alpha / adapter.dim * (adapter.linear_out.weight @ adapter.linear_in.weight)
            for weight in _weights(layer.to_wrap):
                whole = weight + added
                if isinstance(layer, DoRALinear):
                    whole *= (adapter.get_weight_magnitude() / whole.norm(dim=1)).unsqueeze(1)
                weight.data = whole
                count += 1
    return count


def _weights(linear: Any) -> list[Any]:
    """Of a linear layer its matrix, of Transformer Engine's grouped one each expert's."""
    if hasattr(linear, "weight"):
        return [linear.weight]
    return [getattr(linear, f"weight{number}") for number in range(linear.num_gemms)]


def state(model: Any) -> dict[str, Any]:
    """The model's own tensors by the names of a model without adapters."""
    import torch

    found = core(model).state_dict()
    return {
        name.replace(".to_wrap.", "."): value
        for name, value in found.items()
        if isinstance(value, torch.Tensor) and ".adapter." not in name and not name.endswith("_extra_state")
    }
