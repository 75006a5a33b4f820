"""Test `recipes diff`."""

import re

import pytest

from superpod.nemo2.export.field_meanings import MEANINGS, meaning
from tests.nemo2.export.exported import answers

OURS_AND_NEMO_S = "llama3_8b_pretrain_h100_bf16 nemo:llama3_8b"


def by_path(pair):
    return {difference["path"]: difference for difference in answers()["diffs"][pair]}


@pytest.mark.nemo
def test_no_difference_to_itself():
    assert answers()["diffs"]["tiny_llama3 tiny_llama3"] == []


@pytest.mark.nemo
def test_precisions_differ_in_number_formats():
    differences = by_path("tiny_llama3 tiny_llama3_fp32")
    assert differences["trainer.plugins.precision"]["a"] == "'bf16-mixed'"
    assert differences["trainer.plugins.precision"]["b"] == "'32'"
    assert "number format" in differences["trainer.plugins.precision"]["why"]
    assert not [path for path in differences if path.startswith(("data", "model"))]


@pytest.mark.nemo
def test_compares_unset_values_with_defaults():
    differences = by_path(OURS_AND_NEMO_S)
    assert differences["trainer.strategy.context_parallel_size"]["b"] == "2"
    assert differences["log.ckpt.mode"]["b"] == "default 'min'"
    assert "trainer.strategy.expert_model_parallel_size" not in differences  # both 1, set by one only
    assert "optim.lr_scheduler.min_lr" not in differences  # 3e-05, and 0.1 * 3e-4


@pytest.mark.nemo
def test_compares_callbacks_by_class():
    differences = by_path(OURS_AND_NEMO_S)
    assert differences["trainer.callbacks[GarbageCollectionCallback]"]["b"] == "-"
    assert not [path for path in differences if "gc_interval" in path]
    assert "trainer.callbacks[TimingCallback]" not in differences


@pytest.mark.nemo
def test_most_differences_have_a_meaning():
    differences = [row for pair in answers()["diffs"].values() for row in pair if isinstance(row, dict)]
    silent = sorted({row["path"] for row in differences if not row["why"]})
    assert len(silent) <= len(differences) / 10, silent


@pytest.mark.nemo
@pytest.mark.parametrize(
    ("name", "says", "hint"),
    [
        ("nemo:llama3_9b", "NeMo has no recipe module 'llama3_9b'", "llama3_8b"),
        ("nemo:llama3_8b.train_recipe", "has no function train_recipe", "pretrain_recipe"),
        ("nemo:llama33_nemotron_super_49b", "NeMo's recipe function raised an error", ""),
        ("nemo:llama3_8b.run_cli", "has no function run_cli", "finetune_recipe"),
    ],
)
def test_refuses_unknown_name(name, says, hint):
    message, next_move = answers()["diffs"][f"tiny_llama3 {name}"]
    assert says in message
    assert hint in next_move


@pytest.mark.nemo
def test_every_pattern_matches_a_field():
    names = answers()["fields"]
    unused = [p for pattern in MEANINGS for p in alternatives(pattern) if not any(re.fullmatch(p, n) for n in names)]
    assert unused == []


def alternatives(pattern):
    """Split `a|(b|c)_.*` into `a` and `(b|c)_.*`."""
    return re.split(r"\|(?![^(]*\))", pattern)


def test_meaning_of_the_last_name():
    assert "splits every layer" in meaning("trainer.strategy.tensor_model_parallel_size")
    assert "garbage" in meaning("trainer.callbacks[GarbageCollectionCallback]")
    assert meaning("trainer.strategy.no_such_field") == ""
