"""`--from`: the selected checkpoint, and checks of its metadata without NeMo."""

import pytest

from superpod.collection.registry import find
from superpod.errors import UserError
from superpod.launch import convert, start_checkpoint
from superpod.runtime.runs import run_facts
from superpod.runtime.runs.run_folder import RunFolder
from tests.reports.runs import checkpoint_files

SHAPE = find("tiny_llama3_sft").shape


def saved(path, hidden=192, layers=4, rows=512, **more):
    """A checkpoint with Megatron's tensors of a model of that size."""
    checkpoint_files.write(path, **more)
    tensors = {
        start_checkpoint.EMBEDDING: ((rows, hidden), [(rows, hidden)]),
        start_checkpoint.LAYER: ((layers, hidden, hidden), [(1, hidden, hidden)] * layers),
    }
    names = {file.name: file.stat().st_size for file in (path / "weights").glob("*.distcp")}
    (path / "weights" / ".metadata").write_bytes(checkpoint_files.pickled(tensors, names))
    return path


@pytest.fixture
def pretrained(tmp_path):
    run = RunFolder.create(tmp_path / "runs", "tiny_llama3", facts={}, recipe_lines=[])
    saved(run.checkpoints / "step=9-val_loss=0.5")
    saved(run.checkpoints / "step=19-val_loss=0.7")
    (run.path / "metrics.jsonl").write_text(
        '{"step": 10, "loss": 1.0, "val_loss": 0.5}\n{"step": 20, "loss": 1.0, "val_loss": 0.7}\n'
    )
    return run


def test_run_selects_best_and_last_the_latest_checkpoint(pretrained):
    assert start_checkpoint.select_checkpoint(pretrained.path, SHAPE).name == "step=9-val_loss=0.5"
    assert start_checkpoint.select_checkpoint(pretrained.path / "last", SHAPE).name == "step=19-val_loss=0.7"
    one = pretrained.checkpoints / "step=19-val_loss=0.7"
    assert start_checkpoint.select_checkpoint(one, SHAPE) == one
    assert start_checkpoint.to_override(one, "tiny_llama3_sft") == f"resume.restore_config={one}"


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"hidden": 256}, "its hidden size is 256, not 192"),
        ({"layers": 8}, "it has 8 layers, not 4"),
        ({"rows": 128}, "its embedding has 128 rows, but the model's vocabulary has 320"),
    ],
)
def test_other_model_is_refused_with_differences(tmp_path, sizes, says):
    with pytest.raises(UserError, match=says):
        start_checkpoint.select_checkpoint(saved(tmp_path / "step=9", **sizes), SHAPE, 320)


def test_adapters_and_incomplete_checkpoints_are_refused(tmp_path):
    with pytest.raises(UserError, match="is an adapter"):
        start_checkpoint.select_checkpoint(saved(tmp_path / "step=9", adapter=True), SHAPE)
    broken = saved(tmp_path / "step=19")
    next((broken / "weights").glob("*.distcp")).unlink()
    with pytest.raises(UserError, match="no checkpoint is intact"):
        start_checkpoint.select_checkpoint(broken, SHAPE)


def test_adapter_of_a_nemo_checkpoint_needs_like(tmp_path):
    """Its base has other weights: PEFT would load a wrong model without a word."""
    task = {"model": "/models/llama", "data": ["d"], "start": "/runs/r/step=9"}
    facts = {run_facts.FINETUNE: task, "base": task["start"]}
    run = RunFolder.create(tmp_path / "runs", "tiny_llama3_lora", facts=facts, recipe_lines=[])
    saved(run.checkpoints / "step=9-val_loss=0.5", adapter=True)
    with pytest.raises(UserError, match="adapts the NeMo checkpoint /runs/r/step=9, not /models/llama"):
        convert.plan_conversion(run.path, tmp_path / "out", adapter=True)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    job = convert.plan_conversion(run.path, tmp_path / "out", like=tmp_path / "base", adapter=True)
    assert job.arguments["base"] == str(tmp_path / "base")
