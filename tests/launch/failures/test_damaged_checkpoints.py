"""Real NeMo runs lose no step that an intact checkpoint contains."""

import json
import shutil
from pathlib import Path

import pytest

from superpod.runtime.checkpoints import checkpoint_files, manifest, resume
from superpod.runtime.runs.run_folder import RunFolder
from tests.launch.test_local import SMALL, TP1, TP2, Running, losses

pytestmark = [pytest.mark.nemo, pytest.mark.train, pytest.mark.long]

WORDS = ("tiny_llama3", *SMALL, *TP1, "log.ckpt.every_n_train_steps=10", "log.ckpt.save_top_k=9")


@pytest.fixture(scope="module")
def text(tmp_path_factory, recipes_cli):
    """A package of the standard library as a data folder with a vocabulary of 512."""
    folder = tmp_path_factory.mktemp("text") / "data"
    source = ("--text", Path(json.__file__).parents[1] / "email" / "*.py")
    done = recipes_cli("data", "build", *source, "--vocab-size", 512, "--split", "8,1,1", "--out", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text):
    """A run of 40 steps that nothing disturbed."""
    running = Running(tmp_path_factory.mktemp("whole"), *WORDS, "trainer.max_steps=40", "--data", str(text))
    code, output = running.end(600)
    assert code == 0, output
    return running.run_dir()


def unfinished(whole: RunFolder, path: Path) -> RunFolder:
    """A copy that has not reached its last step, without the checkpoint of step 40."""
    shutil.copytree(whole.path, path, symlinks=True)
    run = RunFolder(path)
    (path / "done").unlink()
    (newest,) = run.checkpoints.glob("step=39-consumed_samples=320.0")
    shutil.rmtree(newest)
    return run


def at_step(run: RunFolder, step: int) -> Path:
    (checkpoint,) = (p for p in run.checkpoints.glob(f"step={step - 1}-*") if not p.is_symlink())
    return checkpoint


def flip_bit(checkpoint: Path) -> None:
    file = checkpoint / "weights" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def resumed(run: RunFolder, *words: str) -> tuple[int, str]:
    runs = run.path.parents[1]
    return Running(runs.parent, "tiny_llama3", "--resume", str(run.path), *words, runs=runs).end(600)


def test_every_checkpoint_has_a_manifest(whole):
    for step in (10, 20, 30, 40):
        checkpoint = at_step(whole, step)
        files = {p.relative_to(checkpoint).as_posix() for p in checkpoint.rglob("*") if p.is_file()}
        assert set(manifest.read(checkpoint).records) == {
            name for name in files if not name.startswith(manifest.FOLDER)
        }
        assert checkpoint_files.check_sizes(checkpoint).problems + checkpoint_files.check_all_bytes(checkpoint) == []
    lines = [json.loads(line) for line in (whole.path / resume.SAVED).read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20, 30, 40]


def test_damaged_checkpoints_cost_only_their_steps(whole, tmp_path, recipes_cli):
    """The newest is deleted, the second newest has a flipped bit: steps 21 to 40 are the undisturbed run's."""
    run = unfinished(whole, tmp_path / "runs" / "tiny_llama3" / "copy")
    name = at_step(run, 30).name
    flip_bit(at_step(run, 30))
    verified = recipes_cli("ckpt", "verify", run.path)
    assert verified.returncode == 1
    assert f"{name}: DAMAGED" in verified.stdout
    assert "the next attempt resumes from step 20, 160 samples into its data" in verified.stdout
    code, output = resumed(run)
    assert code == 0, output
    assert "resumes from step 20" in output
    assert (
        f"{name} is corrupt and was moved to damaged/: weights/__0_0.distcp has changed since it was written" in output
    )
    assert "the checkpoint saved at step 40 no longer exists; 20 steps are lost and will be trained again" in output
    assert (run.path / resume.DAMAGED / name / "weights" / "__0_0.distcp").is_file(), "set aside, not deleted"
    result = run.attempts[-1].resume
    assert (result["step"], result["lost_steps"]) == (20, 20)
    second = [line["step"] for line in run.metrics() if line["attempt"] == "002"]
    assert second == list(range(21, 41))
    assert losses(run) == losses(whole), "bit for bit"


def test_run_without_intact_checkpoint_exits_with_2(whole, tmp_path):
    """ "Training from scratch" in silence, before."""
    run = unfinished(whole, tmp_path / "runs" / "tiny_llama3" / "copy")
    for step in (10, 20, 30):
        (at_step(run, step) / "weights" / "common.pt").unlink()
    before = sorted(run.path.rglob("*"))
    code, output = resumed(run)
    assert code == 2
    assert "none of its 3 checkpoints is intact" in output
    assert "start a new run" in output
    assert sorted(run.path.rglob("*")) == before


def test_another_layout_is_refused_before_the_ranks_start(whole, tmp_path):
    run = unfinished(whole, tmp_path / "runs" / "tiny_llama3" / "copy")
    code, output = resumed(run, *TP2, "trainer.max_steps=50")
    assert code == 2, output
    assert "was saved with tensor_model_parallel_size 1, not 2" in " ".join(output.split())
    assert len(run.attempts) == 1
    assert at_step(run, 30).is_dir(), "it is intact, so it stays"
