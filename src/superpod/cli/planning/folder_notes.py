"""Notes in `plan` and `check` on a model read from a Hugging Face config.json: whether NeMo can train it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from superpod.errors import UserError


def training_notes(name: str) -> list[str]:
    """Return notes on whether NeMo has an equivalent model class; [] if `name` is not a config.json or its folder."""
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.suffix != ".json" or not path.is_file():
        return []
    from superpod.common import custom_code
    from superpod.weights.families.nemo_class import find_nemo_class

    try:
        nemo_class = find_nemo_class(json.loads(path.read_bytes()), path.name)
    except UserError as refused:
        return [f"planned from the sizes in config.json; the weights cannot be imported for training: {refused}"]
    folder = shlex.quote(str(path.parent))
    return [
        *custom_code.note(path.parent),
        f"NeMo's {nemo_class.model} is equivalent: `recipes ckpt convert {folder} OUT` imports the weights and "
        f"compares the logits on a few tokens; `recipes finetune RECIPE --model {folder}` trains the model",
    ]
