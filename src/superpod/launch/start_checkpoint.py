"""`--from`: a NeMo checkpoint whose weights a training starts from, checked by its metadata alone. Needs no NeMo."""

from __future__ import annotations

from pathlib import Path

from superpod.errors import UserError
from superpod.planner.models import ModelShape

LAST = "last"
"""`RUN/last`: the newest checkpoint of a run, in place of the one with the least validation loss."""
EMBEDDING = "module.embedding.word_embeddings.weight"
LAYER = "module.decoder.layers.self_attention.linear_proj.weight"
"""Of all layers, the first dimension, where they are alike (Megatron's stacked sharded tensors)."""
PATH = "resume.restore_config"


def select_checkpoint(path: Path, shape: ModelShape, rows: int = 0) -> Path:
    """The checkpoint that `--from` means: itself, or the best or `last` one of a run.

    Args:
        path: a checkpoint, a run folder, a folder of checkpoints, or RUN/last.
        shape: the recipe's model.
        rows: least rows of the embedding, the vocabulary of the model; 0 = unknown.

    Raises:
        UserError: none is intact, it is an adapter's, or another model's, with what differs.
    """
    from superpod.reports.runs import checkpoints

    newest = path.name == LAST and not path.exists()
    intact = [one for one in checkpoints.at(path.parent if newest else path) if one.whole]
    if not intact:
        raise UserError(f"--from {path}: no checkpoint is intact", "`recipes ckpt verify` says what each lacks")
    one = max(intact, key=lambda item: item.step or 0) if newest else checkpoints.best(intact)
    if one.adapter:
        raise UserError(
            f"--from {one.path} is an adapter", "merge it first: recipes ckpt convert RUN OUT, then --model OUT"
        )
    if differences := shape_differences(one.path, shape, rows):
        raise UserError(
            f"--from {one.path} is not {shape.name}: {'; '.join(differences)}", "take the recipe of that model"
        )
    return one.path


def shape_differences(checkpoint: Path, shape: ModelShape, rows: int = 0) -> list[str]:
    """How the weights of a checkpoint differ from a model in size, as far as its metadata tells."""
    from superpod.runtime.checkpoints import checkpoint_metadata

    tensors = checkpoint_metadata.read(checkpoint).tensors
    embedding, layer = tensors.get(EMBEDDING), tensors.get(LAYER)
    differences = []
    if embedding and embedding.shape[-1] != shape.hidden:
        differences.append(f"its hidden size is {embedding.shape[-1]}, not {shape.hidden}")
    if embedding and embedding.shape[0] < rows:
        differences.append(f"its embedding has {embedding.shape[0]} rows, and the model's vocabulary {rows}")
    if layer and len(layer.shape) == 3 and layer.shape[0] != shape.layers:
        differences.append(f"it has {layer.shape[0]} layers, not {shape.layers}")
    return differences


def as_override(path: Path, recipe: str) -> str:
    """`--from` for a recipe as an override. Raises UserError as `chosen`."""
    from superpod.collection.registry import find

    return f"{PATH}={select_checkpoint(path, find(recipe).shape)}"


def read_vocab_size(model: Path) -> int:
    """`vocab_size` of a Hugging Face folder; 0 where its config.json has none."""
    import json

    try:
        rows = json.loads((model / "config.json").read_bytes()).get("vocab_size")
    except (OSError, ValueError, AttributeError, RecursionError):
        return 0
    return rows if isinstance(rows, int) else 0
