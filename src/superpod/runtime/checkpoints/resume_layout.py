"""Whether a checkpoint that was saved under one layout can be resumed from under another. Standard library only."""

from __future__ import annotations

from pathlib import Path

from superpod.runtime.checkpoints.checkpoint_files import saved_layout
from superpod.runtime.checkpoints.checkpoint_metadata import read

SHARDED = "optimizer.distributed.dp_group_idx_"
"""How names of optimizer tensors begin that only another data-parallel size can load (Megatron-Core 0.15's
`dp_reshardable`, NeMo's default; `ckpt_optim_fully_reshardable` writes tensors of the whole model instead)."""

MODEL_PARALLEL = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
"""What decides which weights a rank holds, and so how such an optimizer is cut. Weights load under any layout."""

FLAG = "trainer.strategy.ckpt_optim_fully_reshardable"


def layout_problem(checkpoint: Path, strategy: object) -> tuple[str, str] | None:
    """Why it cannot be resumed from under the layout of `strategy`, and the next move; None when it can.

    `strategy` has NeMo's names of sizes as attributes. A checkpoint that does not say its layout is not judged.
    """
    saved = saved_layout(checkpoint)
    names = [name for name in MODEL_PARALLEL if name in saved]
    sizes = {name: getattr(strategy, name, None) or 1 for name in names}
    differing = [name for name in names if isinstance(sizes[name], int) and sizes[name] != saved[name]]
    if not differing:
        return None
    numbers = ", ".join(f"{name} {saved[name]}, not {sizes[name]}" for name in differing)
    names_of_tensors = _tensors(checkpoint)
    if "tensor_model_parallel_size" in differing and any(map(_is_uncut_expert, names_of_tensors)):
        return (
            f"{checkpoint} is Megatron-FSDP's, with experts, and was saved with {numbers}; Megatron-Core 0.15.3 joins "
            "the gated halves of experts only under the same tensor parallelism, and would load wrong weights",
            "go on with the layout it was saved under",
        )
    if not any(name.startswith(SHARDED) for name in names_of_tensors):
        return None
    return (
        f"{checkpoint} is intact, but was saved with {numbers}; its optimizer was saved in a form that only other "
        "data-parallel sizes can load",
        f"go on with the layout it was saved under; a run that is to change it needs {FLAG}=True from its start",
    )


def _is_uncut_expert(name: str) -> bool:
    """Whether it is an expert's first matrix as Megatron-FSDP saves it: of a dense MLP's it saves the two halves."""
    return name.startswith("model.") and ".experts." in name and "linear_fc1.weight" in name


def _tensors(checkpoint: Path) -> list[str]:
    try:
        return [*read(checkpoint).tensors]
    except ValueError:
        return []
