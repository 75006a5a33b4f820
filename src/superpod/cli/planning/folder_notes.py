"""Notes of `plan` and `check` on whether NeMo can train a model that is described by a Hugging Face config.json."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from superpod.errors import UserError


def training_notes(name: str) -> list[str]:
    """Return notes on NeMo's equivalent of a Hugging Face model; [] if `name` is not a config.json or its folder."""
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.suffix != ".json" or not path.is_file():
        return []
    from superpod.common import custom_code
    from superpod.weights.families.nemo_class import find_nemo_class

    try:
        nemo_class = find_nemo_class(json.loads(path.read_bytes()), path.name)
    except UserError as refused:
        return [f"the plan is valid, but the weights cannot be imported for training: {refused}"]
    folder = shlex.quote(str(path.parent))
    return [
        *custom_code.note(path.parent),
        f"NeMo's {nemo_class.model} is equivalent: `recipes ckpt convert {folder} OUT` imports the weights and "
        f"compares the logits on a few tokens; `recipes finetune RECIPE --model {folder}` trains the model",
    ]
