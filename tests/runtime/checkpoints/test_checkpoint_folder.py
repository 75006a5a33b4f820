import importlib.metadata
from pathlib import Path

import pytest

from superpod.runtime.checkpoints.checkpoint_folder import discard_unfinished


def make_checkpoint(folder: Path, *, whole: bool = True, common: bool = True) -> Path:
    (folder / "weights").mkdir(parents=True)
    (folder / "context").mkdir()
    (folder / "weights" / "__0_0.distcp").write_bytes(b"0")
    if common:
        (folder / "weights" / "common.pt").write_bytes(b"0")
    if whole:
        (folder / "weights" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return folder


def case_marked(at: Path) -> set[str]:
    make_checkpoint(at / "m--step=9-last")
    (at / "m--step=9-last-unfinished").touch()
    return {"m--step=9-last", "m--step=9-last-unfinished"}


def case_marker_alone(at: Path) -> set[str]:
    (at / "m--step=9-last-unfinished").touch()
    return {"m--step=9-last-unfinished"}


def case_empty(at: Path) -> set[str]:
    (at / "m--step=9").mkdir()
    return {"m--step=9"}


def case_link_to_unfinished(at: Path) -> set[str]:
    make_checkpoint(at / "m--step=9", whole=False)
    (at / "m--step=9-last").symlink_to("m--step=9")
    (at / "m--step=9-unfinished").touch()
    return {"m--step=9", "m--step=9-last", "m--step=9-unfinished"}


def case_half_without_a_mark(at: Path) -> set[str]:
    """Damage, which is set aside and never deleted (tests/runtime/checkpoints/test_resume.py)."""
    make_checkpoint(at / "m--step=9", whole=False)
    (make_checkpoint(at / "m--step=8") / "weights" / "metadata.json").write_text("")
    return set()


def case_what_a_removal_left(at: Path) -> set[str]:
    (at / "m--step=9" / "manifest").mkdir(parents=True)
    (at / "m--step=9" / "manifest" / "0.json").write_text("{}")
    return {"m--step=9"}


def case_file(at: Path) -> set[str]:
    for name in ("m--step=9.ckpt", "m--step=9-EMA.ckpt", "m--step=9-unfinished"):
        (at / name).touch()
    return {"m--step=9.ckpt", "m--step=9-EMA.ckpt", "m--step=9-unfinished"}


def case_somebodys_own(at: Path) -> set[str]:
    (at / "notes").mkdir()
    (at / "notes" / "a.txt").touch()
    (at / "hf" / "hf_weights").mkdir(parents=True)
    (at / "fsdp").mkdir()
    for name in (".metadata", "common.pt"):
        (at / "fsdp" / name).touch()
    (at / "fsdp" / "context").mkdir()
    return set()


@pytest.mark.parametrize("case", [value for name, value in sorted(globals().items()) if name.startswith("case_")])
def test_only_unfinished_checkpoints_are_discarded(run, case):
    kept = {make_checkpoint(run.checkpoints / name).name for name in ("m--step=4", "m--step=4-last", "m--step=7")}
    (run.checkpoints / "m--step=7-last").symlink_to("m--step=7")
    doomed = case(run.checkpoints)
    kept |= {p.name for p in run.checkpoints.iterdir()} - doomed
    assert {p.name for p in discard_unfinished(run.checkpoints)} == doomed
    assert {p.name for p in run.checkpoints.iterdir()} == kept
    assert discard_unfinished(run.checkpoints) == []


def test_a_marked_one_that_may_be_complete_can_be_left(run):
    """A full disk is freed of halves before anybody has judged what is whole."""
    complete, half = (
        make_checkpoint(run.checkpoints / "step=9"),
        make_checkpoint(run.checkpoints / "step=8", whole=False),
    )
    for folder in (complete, half):
        folder.with_name(f"{folder.name}-unfinished").touch()
    run.discard_unfinished()
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step=9", "step=9-unfinished"]


def test_there_may_be_no_checkpoints_yet(tmp_path):
    assert discard_unfinished(tmp_path / "none") == []


@pytest.mark.nemo
@pytest.mark.parametrize(
    ("package", "file", "line"),
    [
        ("nemo_toolkit", "nemo/lightning/pytorch/callbacks/model_checkpoint.py", 'CHECKPOINT_SUFFIX = "-unfinished"'),
        ("nemo_toolkit", "nemo/lightning/ckpt_utils.py", 'WEIGHTS_PATH: str = "weights"'),
        ("megatron-core", "megatron/core/dist_checkpointing/core.py", "CONFIG_FNAME = 'metadata.json'"),
        ("megatron-core", "megatron/core/dist_checkpointing/strategies/common.py", "COMMON_STATE_FNAME = 'common.pt'"),
    ],
)  # fmt: skip
def test_nemo_and_megatron_still_use_these_names(package, file, line):
    try:
        path = importlib.metadata.distribution(package).locate_file(file)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    assert line in Path(str(path)).read_text()
