"""The recipe builds, has our samples, and needs nothing from the project that exported it."""

import importlib.util
import json
from pathlib import Path

from my_tuning import train

DATA = Path(__file__).parent.parent / "data"


def test_the_recipe_is_the_exported_one_with_this_project_s_data() -> None:
    """As the README says of train.py."""
    whole = train.tuned(steps=3)
    assert whole.trainer.max_steps == 3
    assert whole.optim.config.lr == 1e-3
    assert whole.data.dataset_root == str(DATA)
    assert whole.data.global_batch_size % whole.data.micro_batch_size == 0


def test_samples_have_what_nemo_reads() -> None:
    """A line is an object with `input` and `output`."""
    for name in ("training", "validation"):
        rows = [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]
        assert rows
        assert all(row["input"] and row["output"] for row in rows)


def test_the_recipe_came_alone() -> None:
    """The exported file imports nothing of superpod-recipes."""
    text = Path(str(importlib.util.find_spec("my_tuning.my_recipe").origin)).read_text()
    assert "import superpod" not in text
    assert "from superpod" not in text
