import importlib.metadata
from pathlib import Path

import pytest

from superpod.node.checkpoints import discard_unfinished


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


def case_no_metadata(at: Path) -> set[str]:
    make_checkpoint(at / "m--step=9", whole=False)
    return {"m--step=9"}


def case_no_common(at: Path) -> set[str]:
    make_checkpoint(at / "m--step=9", common=False)
    return {"m--step=9"}


def case_torn_metadata(at: Path) -> set[str]:
    (make_checkpoint(at / "m--step=9") / "weights" / "metadata.json").write_text("")
    return {"m--step=9"}


def case_empty(at: Path) -> set[str]:
    (at / "m--step=9").mkdir()
    return {"m--step=9"}


def case_attempt_to_half(at: Path) -> set[str]:
    make_checkpoint(at / "m--step=9", whole=False)
    (at / "m--step=9-last").symlink_to("m--step=9")
    return {"m--step=9", "m--step=9-last"}


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
    kept = {make_checkpoint(run.checkpoints / name).name for name in ("m--step=4", "m--step=4-last", "m--step=8")}
    (run.checkpoints / "m--step=8-last").symlink_to("m--step=8")
    doomed = case(run.checkpoints)
    kept |= {p.name for p in run.checkpoints.iterdir()} - doomed
    assert {p.name for p in run.discard_unfinished()} == doomed
    assert {p.name for p in run.checkpoints.iterdir()} == kept
    assert discard_unfinished(run.checkpoints) == []


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
