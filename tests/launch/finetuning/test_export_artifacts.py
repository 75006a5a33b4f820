"""The evaluation and the adapter of an exported folder."""

import json

import numpy as np
import pytest

from superpod.errors import UserError
from superpod.launch.finetuning import export_artifacts
from superpod.launch.finetuning.export_artifacts import Evaluation
from superpod.runtime.runs.run_folder import RunFolder
from superpod.weights.serving import evaluate


def measured(loss, nemo, answers=(), least=None, most=None):
    return Evaluation(loss, least or loss, most or loss, 100, 7, "float32", [*answers], nemo)


@pytest.mark.parametrize(
    ("loss", "nemo", "agrees"),
    [(1.0, 1.001, True), (1.0, None, True), (0.5, 0.525, True), (1.0, 1.06, False), (3.0, 1.0, False)],
)
def test_losses_agree_up_to_rounding(loss, nemo, agrees):
    assert measured(loss, nemo).agrees == agrees


@pytest.mark.parametrize(("nemo", "agrees"), [(2.19, True), (2.4063, True), (2.45, True), (2.1, False), (2.6, False)])
def test_nemo_mean_is_between_batch_losses(nemo, agrees):
    """Qwen2 of test_finetune: 119 tokens in the first batch and 23 in the last, which NeMo's mean weighs more."""
    assert measured(2.2309, nemo, least=2.1917, most=2.4339).agrees == agrees


def test_samples_know_their_global_batch(tmp_path):
    rows = [
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0], "seq_start_id": [0]},
        {"input_ids": [5, 6, 7, 8], "loss_mask": [1, 0, 1, 0], "seq_start_id": [0, 2]},
        {"input_ids": [0, 0], "loss_mask": [0, 0], "seq_start_id": [0]},
        {"input_ids": [8, 9], "loss_mask": [1, 0], "seq_start_id": [0]},
    ]
    np.save(tmp_path / "packed.npy", np.array(rows, dtype=object), allow_pickle=True)
    assert [number for number, _ in evaluate.iterate_samples(tmp_path / "packed.npy", 2)] == [0, 0, 0, 1]


def test_nan_loss_does_not_agree():
    assert not measured(float("nan"), 1.0).agrees


def test_lines_and_refusal(tmp_path):
    answer = {"prompt": "two and two are", "answer": "four", "expected": "four"}
    lines = measured(0.5, 0.51, [answer]).lines()
    assert (
        "validation loss 0.5000, perplexity 1.65, 100 tokens in 7 samples; loss of the checkpoint in NeMo: 0.5100"
        in lines[0]
    )
    assert lines[1] == '  "two and two are" -> "four" (data: "four")'
    assert "Do not serve this model" in measured(3.0, 1.0).mismatch_message(tmp_path)


def test_logged_loss_has_all_digits(tmp_path):
    run = RunFolder.create(tmp_path, "tiny", facts={}, recipe_lines=[])
    lines = [{"step": 10, "loss": 1.0, "val_loss": 0.123456}, {"step": 11, "loss": 1.0, "val_loss": None}]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert export_artifacts.logged_loss(run, "step=9-val_loss=0.1235") == 0.123456
    assert export_artifacts.logged_loss(run, "step=10-val_loss=0.1") is None


def test_refused_adapter_is_reported(tmp_path, monkeypatch):
    def refuse(*words, **options):
        raise UserError("PEFT cannot represent this adapter: why")

    run = RunFolder.create(tmp_path, "tiny", facts={}, recipe_lines=[])
    monkeypatch.setattr("superpod.launch.convert.plan_conversion", refuse)
    old = export_artifacts.adapter_folder(tmp_path / "hf")
    old.mkdir()
    (old / "adapter_config.json").write_text("{}")  # of an earlier export
    assert export_artifacts.export_adapter(run, tmp_path / "hf") == [
        "no adapter for PEFT: PEFT cannot represent this adapter: why"
    ]
    assert not old.exists()
