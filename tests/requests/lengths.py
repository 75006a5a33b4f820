"""lengths.py FILE: every model and task with half and twice its sequence, built; what differs goes to FILE, as JSON.

NeMo is imported once, in this process of its own.
"""

import json
import sys
from pathlib import Path
from typing import Any

from superpod.collection import registry
from superpod.errors import UserError
from superpod.nemo2.validation import configured_job
from superpod.requests import resolve
from superpod.requests.request import Request


def main(file: str) -> None:
    recipes = {(r.model.name, r.task): r for r in reversed(registry.recipes().values())}
    results = {f"{name} {task}": check_lengths(recipe) for (name, task), recipe in recipes.items()}
    Path(file).write_text(json.dumps(results))


def check_lengths(recipe: registry.Recipe) -> dict[str, str]:
    """Return sequence length -> `refused: ...`, or the differences; "" = all fields agree."""
    return {str(seq): check_length(recipe, seq) for seq in (recipe.seq // 2, recipe.seq * 2)}


def check_length(recipe: registry.Recipe, seq: int) -> str:
    request = Request(recipe.name, seq=seq)
    try:
        request.check()
    except UserError as refused:
        return f"refused: {refused}"
    partial, _ = resolve.build_configuration(request)
    config = partial.model.config
    planned, built = request.job(), configured_job.job_from_partial(partial, recipe)
    have: dict[str, Any] = {"data": partial.data.seq_length, "model": config.seq_length}
    have |= {"planned": planned.seq, "built": built.seq}
    wrong = {name: value for name, value in have.items() if value != seq}
    if recipe.shape.cross_attention and config.max_position_embeddings < seq:  # NeMo's T5: a table of its own length
        wrong["table"] = config.max_position_embeddings
    if (built.layout, built.model.positions) != (planned.layout, planned.model.positions):
        wrong["layout"] = [str(built.layout), str(planned.layout), built.model.positions, planned.model.positions]
    return "" if not wrong else json.dumps(wrong)


if __name__ == "__main__":
    main(*sys.argv[1:])
