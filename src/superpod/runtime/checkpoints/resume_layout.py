"""Check whether a checkpoint can be resumed with a different layout. Standard library only."""

from __future__ import annotations

from pathlib import Path

from superpod.runtime.checkpoints.checkpoint_files import saved_layout
from superpod.runtime.checkpoints.checkpoint_metadata import read

SHARDED = "optimizer.distributed.dp_group_idx_"
"""Prefix of optimizer tensors that can be resharded only to another data-parallel size (Megatron-Core 0.15's
`dp_reshardable`, NeMo's default). With `ckpt_optim_fully_reshardable`, the tensors are those of the unsharded model."""

MODEL_PARALLEL = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
"""Sizes that determine the weights of a rank, and therefore the shards of such an optimizer. The weights themselves can
be loaded with any layout."""

FLAG = "trainer.strategy.ckpt_optim_fully_reshardable"


def layout_problem(checkpoint: Path, strategy: object) -> tuple[str, str] | None:
    """Return the reason why a checkpoint cannot be resumed with the layout of `strategy`, and a hint; None if it can.

    `strategy` is NeMo's strategy or a configuration of it. A checkpoint whose layout is unknown is not checked.
    """
    layout = saved_layout(checkpoint)
    names = [name for name in MODEL_PARALLEL if name in layout]
    sizes = {name: getattr(strategy, name, None) or 1 for name in names}
    differing_names = [name for name in names if isinstance(sizes[name], int) and sizes[name] != layout[name]]
    if not differing_names:
        return None
    differences = ", ".join(f"{name} {layout[name]}, not {sizes[name]}" for name in differing_names)
    try:
        names_of_tensors = list(read(checkpoint).tensors)
    except ValueError:
        names_of_tensors = []
    if "tensor_model_parallel_size" in differing_names and any(map(_is_fused_expert, names_of_tensors)):
        return (
            f"{checkpoint} was saved by Megatron-FSDP with experts and {differences}; Megatron-Core 0.15.3 "
            "joins the gated halves of experts only with the same tensor parallel size, and would load wrong weights",
            "resume with the layout of the checkpoint",
        )
    if not any(name.startswith(SHARDED) for name in names_of_tensors):
        return None
    return (
        f"{checkpoint} is intact, but was saved with {differences}; its optimizer format can be resharded only to "
        "another data-parallel size",
        f"resume with the layout of the checkpoint; to change the layout of a run, start it with {FLAG}=True",
    )


def _is_fused_expert(name: str) -> bool:
    """Return whether a tensor is the fused first matrix of an expert. Of dense MLPs, Megatron-FSDP saves two halves."""
    return name.startswith("model.") and ".experts." in name and "linear_fc1.weight" in name
