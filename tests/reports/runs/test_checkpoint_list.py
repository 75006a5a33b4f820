"""Intact and damaged checkpoints, listed and pruned without torch or NeMo."""

import json
import os
import pickle

import pytest

from superpod.errors import UserError
from superpod.reports.runs import checkpoint_list
from superpod.runtime.checkpoints import checkpoint_files, checkpoint_metadata
from superpod.runtime.runs.run_folder import RunFolder
from tests.reports.runs import checkpoint_files as made


@pytest.fixture
def tuned(tmp_path):
    """A run with checkpoints of steps 10, 20 and 30; the best is that of 20, the newest that of 30."""
    run = RunFolder.create(tmp_path / "runs", "tiny", facts={}, recipe_lines=["a = 1"])
    for step, loss in ((10, 2.5), (20, 1.5), (30, 1.75)):
        made.write(run.checkpoints / f"step={step - 1}-val_loss={loss:.4f}")
        with (run.path / "metrics.jsonl").open("a") as lines:
            lines.write(json.dumps({"t": 1.0, "step": step, "loss": 2.0, "val_loss": loss}) + "\n")
    return run


def test_a_whole_checkpoint_says_what_it_is(tmp_path):
    [checkpoint] = checkpoint_list.list_checkpoints(made.write(tmp_path / "step=19-last", adapter=True))
    assert (checkpoint.step, checkpoint.is_intact, checkpoint.newest, checkpoint.adapter, checkpoint.optimizer) == (
        20,
        True,
        True,
        True,
        True,
    )
    assert checkpoint.parameters == 24
    assert checkpoint.layout == {"tp": 2, "pp": 1, "ranks": 4}
    assert checkpoint.bytes == sum(
        file.stat().st_size for file in (tmp_path / "step=19-last").rglob("*") if file.is_file()
    )
    held = checkpoint_metadata.read(tmp_path / "step=19-last")
    assert held.model == {"decoder.weight": checkpoint_metadata.Tensor((4, 6), "bfloat16", 24)}
    assert (
        checkpoint_list.list_checkpoints(made.write(tmp_path / "weights only", optimizer=False))[0].optimizer is False
    )


def test_the_chunks_of_megatron_fsdp_have_plain_tuples(tmp_path):
    name, chunks = "model.module.decoder.weight", [(1, 6), (3, 6)]
    (tmp_path / ".metadata").write_bytes(made.pickled({name: ((4, 6), chunks)}, {}, fsdp=True))
    assert checkpoint_metadata.read(tmp_path).model == {name: checkpoint_metadata.Tensor((4, 6), "bfloat16", 24)}


def cut(file):
    os.truncate(file, file.stat().st_size - 3)


def flip(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


DAMAGES = {
    "__1_0.distcp is missing": lambda folder: (folder / "weights" / "__1_0.distcp").unlink(),
    "__1_0.distcp has 119 bytes, 3 too few": lambda folder: cut(folder / "weights" / "__1_0.distcp"),
    "weights/common.pt is missing or corrupt": lambda folder: cut(folder / "weights" / "common.pt"),
    "common.pt is missing or corrupt": lambda folder: flip(folder / "weights" / "common.pt", 32),
    "weights/metadata.json, which is written last": lambda folder: (folder / "weights" / "metadata.json").unlink(),
    "weights/.metadata is missing": lambda folder: (folder / "weights" / ".metadata").unlink(),
    "weights/.metadata is corrupt": lambda folder: cut(folder / "weights" / ".metadata"),
    "context/io.json is missing or corrupt": lambda folder: cut(folder / "context" / "io.json"),
    "marked as unfinished": lambda folder: folder.with_name(f"{folder.name}-unfinished").touch(),
    "1 tensors are incomplete, such as decoder.weight": lambda folder: (folder / "weights" / ".metadata").write_bytes(
        made.pickled({"decoder.weight": ((4, 6), [(2, 6)])}, {"__0_0.distcp": 64})
    ),
}


@pytest.mark.parametrize("says", DAMAGES)
def test_every_damage_is_found_and_named(says, tmp_path):
    folder = made.write(tmp_path / "step=9")
    assert checkpoint_files.check_sizes(folder).problems == []
    DAMAGES[says](folder)
    [problem] = checkpoint_files.check_sizes(folder).problems
    assert says in problem.text


@pytest.mark.parametrize("damage", [lambda file: flip(file, 8 + 36), lambda file: file.write_bytes(bytes(4096))])
def test_contents_that_are_not_what_was_written_are_found(damage, tmp_path):
    folder = made.write(tmp_path / "step=9")
    assert checkpoint_files.check_all_bytes(folder) == []
    damage(folder / "weights" / "__1_0.distcp")
    assert checkpoint_files.check_sizes(folder).problems == []
    [problem] = checkpoint_files.check_all_bytes(folder)
    assert problem.text.startswith("weights/__1_0.distcp is corrupt between bytes 8 and ")


def test_an_adapter_without_its_base_is_not_whole(tmp_path):
    folder = made.write(tmp_path / "step=9", adapter=True)
    (tmp_path / "base" / "weights").rmdir()
    assert "which does not exist" in checkpoint_list.list_checkpoints(folder)[0].problems[0].text
    (folder / "weights" / "adapter_metadata.json").write_text("xx")
    assert "adapter_metadata.json is corrupt" in checkpoint_list.list_checkpoints(folder)[0].problems[0].text


def test_a_loss_that_is_no_number_is_no_best(tuned):
    text = (tuned.path / "metrics.jsonl").read_text()
    (tuned.path / "metrics.jsonl").write_text(text.replace('"val_loss": 2.5', '"val_loss": NaN'))
    assert checkpoint_list.choose_best(checkpoint_list.list_checkpoints(tuned.path)).step == 20


def test_nothing_in_the_pickle_is_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    folder = made.write(tmp_path / "step=9")
    (folder / "weights" / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert [problem.text for problem in checkpoint_files.check_sizes(folder).problems] == [
        "weights/.metadata is corrupt: AttributeError"
    ]
    assert not (tmp_path / "executed").exists()


def test_the_best_has_the_least_validation_loss_and_is_intact(tuned):
    listed = checkpoint_list.list_checkpoints(tuned.path)
    assert [(checkpoint.step, checkpoint.val_loss) for checkpoint in listed] == [(10, 2.5), (20, 1.5), (30, 1.75)]
    assert checkpoint_list.choose_best(listed).step == 20
    assert checkpoint_list.list_checkpoints(tuned.checkpoints) == listed
    assert checkpoint_list.list_checkpoints(listed[1].path) == listed[1:2]
    cut(listed[1].path / "weights" / "__0_0.distcp")
    assert checkpoint_list.choose_best(checkpoint_list.list_checkpoints(tuned.path)).step == 30
    (tuned.path / "metrics.jsonl").unlink()
    assert checkpoint_list.choose_best(checkpoint_list.list_checkpoints(tuned.path)).step == 30  # the newest
    with pytest.raises(UserError, match="no checkpoint is intact"):
        checkpoint_list.choose_best([])


def test_what_is_spared_is_the_newest_the_best_and_nothing_broken(tuned):
    (tuned.checkpoints / "step=39").mkdir()
    (tuned.checkpoints / "step=39" / "weights").mkdir()
    listed = checkpoint_list.list_checkpoints(tuned.path)
    assert [checkpoint.step for checkpoint in checkpoint_list.choose_removable(listed, 1)] == [10, 40]
    assert [checkpoint.step for checkpoint in checkpoint_list.choose_removable(listed, 3)] == [40]
    assert checkpoint_list.choose_removable(listed[3:], 1) == []  # half of something may be all there is
    with pytest.raises(UserError, match="--keep 0 would leave nothing"):
        checkpoint_list.choose_removable(listed, 0)


def test_removing_is_marked_meanwhile_and_takes_dangling_attempts_along(tuned, monkeypatch):
    first = checkpoint_list.list_checkpoints(tuned.path)[0]
    (tuned.checkpoints / "link-last").symlink_to(first.path)

    def killed(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoint_list.remove_checkpoint(first)
    assert "marked as unfinished" in [
        problem.text for problem in checkpoint_list.list_checkpoints(tuned.path)[0].problems
    ]
    checkpoint_list.remove_checkpoint(first)
    assert sorted(path.name for path in tuned.checkpoints.iterdir()) == [
        "step=19-val_loss=1.5000",
        "step=29-val_loss=1.7500",
    ]


def test_what_holds_none_is_refused(tmp_path):
    for path, says in ((tmp_path / "none", "not a folder"), (tmp_path, "no checkpoint")):
        with pytest.raises(UserError, match=says):
            checkpoint_list.list_checkpoints(path)
