"""Test the recipe of this project."""

import importlib.util
import json
from pathlib import Path

from my_tuning import train

DATA = Path(__file__).parent.parent / "data"


def test_recipe_has_the_data_of_this_project() -> None:
    """The recipe has the given steps, the exported learning rate, and the samples of data/."""
    partial = train.tuned(steps=3)
    assert partial.trainer.max_steps == 3
    assert partial.optim.config.lr == 1e-3
    assert partial.data.dataset_root == str(DATA)
    assert partial.data.global_batch_size % partial.data.micro_batch_size == 0


def test_samples_have_input_and_output() -> None:
    """NeMo requires both keys in each line."""
    for name in ("training", "validation"):
        rows = [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]
        assert rows
        assert all(row["input"] and row["output"] for row in rows)


def test_recipe_does_not_import_superpod() -> None:
    """The exported file is standalone."""
    text = Path(str(importlib.util.find_spec("my_tuning.my_recipe").origin)).read_text()
    assert "import superpod" not in text
    assert "from superpod" not in text
