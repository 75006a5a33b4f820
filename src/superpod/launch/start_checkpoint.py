"""Select the NeMo checkpoint from which training starts (`--from`), and check its metadata. Does not need NeMo."""

from __future__ import annotations

from pathlib import Path

from superpod.errors import UserError
from superpod.planner.models import ModelShape

LAST = "last"
"""`RUN/last` is the latest checkpoint of a run; RUN is the one with the lowest validation loss."""
EMBEDDING = "module.embedding.word_embeddings.weight"
LAYER = "module.decoder.layers.self_attention.linear_proj.weight"
"""A weight of all layers, stacked along the first dimension if all layers have the same shape (Megatron's sharding)."""
PATH = "resume.restore_config"


def select_checkpoint(path: Path, shape: ModelShape, rows: int = 0) -> Path:
    """Return the checkpoint that `--from` specifies: `path` itself, or the best or latest checkpoint of a run.

    `path` is a checkpoint, a run folder, a folder of checkpoints, or RUN/last; `rows` is the minimum number of rows of
    the embedding (the vocabulary size), 0 = unknown. Raises UserError if no checkpoint is intact, or it contains an
    adapter or a model of another shape.
    """
    from superpod.reports.runs import checkpoint_list

    is_last = path.name == LAST and not path.exists()
    checkpoints = checkpoint_list.list_checkpoints(path.parent if is_last else path)
    intact_checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.is_intact]
    if not intact_checkpoints:
        raise UserError(f"--from {path}: no checkpoint is intact", "`recipes ckpt verify` lists the problems")
    if is_last:
        checkpoint = max(intact_checkpoints, key=lambda checkpoint: checkpoint.step or 0)
    else:
        checkpoint = checkpoint_list.choose_best(intact_checkpoints)
    if checkpoint.adapter:
        raise UserError(
            f"--from {checkpoint.path} is an adapter",
            "merge it with `recipes ckpt convert RUN OUT`, then use --model OUT",
        )
    differences = shape_differences(checkpoint.path, shape, rows)
    if differences:
        raise UserError(
            f"--from {checkpoint.path} is not {shape.name}: {'; '.join(differences)}", "use the recipe of that model"
        )
    return checkpoint.path


def shape_differences(checkpoint: Path, shape: ModelShape, rows: int = 0) -> list[str]:
    """Return the differences between a checkpoint's metadata and a model shape as sentences; [] if they match.

    `rows` is the minimum number of rows of the embedding.
    """
    from superpod.runtime.checkpoints import checkpoint_metadata

    tensors = checkpoint_metadata.read(checkpoint).tensors
    embedding, layer = tensors.get(EMBEDDING), tensors.get(LAYER)
    differences = []
    if embedding and embedding.shape[-1] != shape.hidden:
        differences.append(f"its hidden size is {embedding.shape[-1]}, not {shape.hidden}")
    if embedding and embedding.shape[0] < rows:
        differences.append(f"its embedding has {embedding.shape[0]} rows, but the model's vocabulary has {rows}")
    if layer and len(layer.shape) == 3 and layer.shape[0] != shape.layers:
        differences.append(f"it has {layer.shape[0]} layers, not {shape.layers}")
    return differences


def to_override(path: Path, recipe: str) -> str:
    """Return the override that starts `recipe` from the checkpoint `path` (`--from`). Raises UserError."""
    from superpod.collection.registry import find

    return f"{PATH}={select_checkpoint(path, find(recipe).shape)}"


def read_vocab_size(model: Path) -> int:
    """Return `vocab_size` from the config.json of a Hugging Face folder; 0 if it is missing."""
    import json

    try:
        rows = json.loads((model / "config.json").read_bytes()).get("vocab_size")
    except (OSError, ValueError, AttributeError, RecursionError):
        return 0
    return rows if isinstance(rows, int) else 0
