"""What `plan` and `check` say of a model that was read from a Hugging Face config.json: whether NeMo can train it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from superpod.errors import UserError


def training(name: str) -> list[str]:
    """Whether a class of NeMo computes the same function, where `name` is a config.json or its folder; else []."""
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.suffix != ".json" or not path.is_file():
        return []
    from superpod.common import custom_code
    from superpod.weights.families.nearest import nearest_class

    try:
        nearest = nearest_class(json.loads(path.read_bytes()), path.name)
    except UserError as refused:
        return [f"planned by its sizes; its weights are not imported for training: {refused}"]
    folder = shlex.quote(str(path.parent))
    return [
        *custom_code.note(path.parent),
        f"NeMo's {nearest.model} computes it: recipes ckpt convert {folder} OUT imports its weights, and compares the "
        f"two on a few tokens; recipes finetune RECIPE --model {folder} trains it",
    ]
