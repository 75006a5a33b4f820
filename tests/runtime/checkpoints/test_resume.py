"""Which checkpoint a run resumes from, with real files as NeMo and Megatron write them.

Never a step lost that an intact checkpoint holds, never a silent start from scratch, and nothing deleted.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from superpod.runtime.checkpoints import checkpoint_files, manifest, resume, resume_layout
from superpod.runtime.checkpoints.saved_checkpoints import own_files
from superpod.runtime.runs.run_folder import RunFolder
from tests.reports.runs import checkpoint_files as made

STEPS = (10, 20, 30)
WEIGHTS = "weights/__1_0.distcp"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs", "tiny", facts={}, recipe_lines=["a = 1"])


def saved(run: RunFolder, steps: tuple[int, ...] = STEPS, *, with_manifest: bool = True) -> list[Path]:
    """Checkpoints as the runs of this project leave them: newest linked as `-last`, manifests, and saved.jsonl."""
    folders = [made.write(run.checkpoints / f"step={step - 1}-consumed_samples={step * 8}.0") for step in steps]
    for folder in folders:
        resume.record_saved(run.path, folder)
        if with_manifest:
            write_manifest(folder)
    (run.checkpoints / f"{folders[-1].name}-last").symlink_to(folders[-1].name)
    return folders


def write_manifest(folder: Path) -> None:
    """As two nodes of one rank each do."""
    for rank in (0, 1):
        manifest.write_part(folder, str(rank), own_files(folder, rank, 1), parts=2 if rank == 0 else 0)


def attempt_of(run: RunFolder) -> tuple[resume.Resume, dict]:
    """What the next attempt resumes from, and its result.json."""
    decided = resume.decide(run)
    attempt = run.new_attempt()
    resume.apply_decision(run, attempt, decided)
    links = list((attempt.path / resume.FOLDER).iterdir())
    assert [link.resolve() for link in links] == ([decided.checkpoint.resolve()] if decided.checkpoint else [])
    assert all(link.name.endswith("-last") for link in links), "or NeMo does not see it"
    return decided, attempt.result


def files_of(run: RunFolder) -> dict[str, bytes]:
    """Every file of every checkpoint, wherever it lies in the run folder."""
    folders = [run.checkpoints, run.path / resume.DAMAGED]
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file() and not file.is_symlink()]
    return {file.relative_to(run.path).as_posix().partition("/")[2]: file.read_bytes() for file in files}


def truncate(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 3)


def empty_file(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, 0)


def empty_folder(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def delete(folder: Path) -> None:
    shutil.rmtree(folder)


def delete_file(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def unreadable(folder: Path) -> None:
    """A file that no user can open, not even root: a link that leads to itself (ELOOP)."""
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("__1_0.distcp")


def pipe(folder: Path) -> None:
    """Something that would hang whoever opens it."""
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def flip(name: str, at: int) -> Callable[[Path], None]:
    def flip_bit(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[at] ^= 4
        (folder / name).write_bytes(data)

    return flip_bit


def half(folder: Path) -> None:
    """No end of the save, and no mark of NeMo's."""
    (folder / "weights" / "metadata.json").unlink()


DAMAGES = {
    "truncated": truncate,
    "an empty file": empty_file,
    "an empty folder": empty_folder,
    "one flipped bit of a weight": flip(WEIGHTS, 45),
    "one flipped bit of a header": flip(WEIGHTS, 20),
    "one flipped bit of common.pt": flip("weights/common.pt", 36),
    "one flipped bit of .metadata": flip("weights/.metadata", 80),
    "one flipped bit of metadata.json": flip("weights/metadata.json", 22),
    "deleted": delete,
    "a deleted file": delete_file,
    "unreadable": unreadable,
    "a pipe": pipe,
    "half": half,
}


@pytest.mark.parametrize("which", ["newest", "second newest", "both", "oldest", "all"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_no_step_is_lost_that_a_whole_checkpoint_holds(damage, which, run):
    """Every kind of damage."""
    folders = saved(run)
    damaged = {"newest": [2], "second newest": [1], "both": [1, 2], "oldest": [0], "all": [0, 1, 2]}[which]
    for number in damaged:
        DAMAGES[damage](folders[number])
    before = files_of(run)
    whole = [number for number in (0, 1, 2) if number not in damaged]
    if not whole:
        with pytest.raises(resume.NoIntactCheckpointError) as refused:
            resume.decide(run)
        assert "nothing was changed" in refused.value.hint
        assert "start a new run" in refused.value.hint
        assert not run.attempts
    else:
        decided, result = attempt_of(run)
        assert decided.checkpoint == folders[whole[-1]]
        lost = STEPS[2] - STEPS[whole[-1]]
        assert (result["resume"]["step"], result["resume"]["lost_steps"]) == (STEPS[whole[-1]], lost)
        assert (f"{lost} steps are lost" in result["resume"]["words"]) == bool(lost)
        assert attempt_of(run)[0] == resume.Resume(decided.checkpoint), "said once"
    assert files_of(run) == before, "nothing is deleted, wherever it lies now"


@pytest.mark.parametrize("damage", ["truncated", "one flipped bit of a weight", "one flipped bit of common.pt"])
def test_damage_is_seen_without_a_manifest_too(damage, run):
    """Checkpoints of earlier versions, and of jobs that were killed before the manifest was written."""
    folders = saved(run, with_manifest=False)
    DAMAGES[damage](folders[2])
    decided, _ = attempt_of(run)
    assert decided.checkpoint == folders[1]
    assert [path.name for path in (run.path / resume.DAMAGED).iterdir()] == [folders[2].name]


def test_a_file_without_permission_is_not_read_and_the_next_whole_one_is_taken(run, tmp_path):
    """As another user than root, whom permissions do not hold."""
    if os.geteuid():
        pytest.skip("changing the user needs root")
    folders = saved(run)
    for path in [tmp_path, *tmp_path.rglob("*")]:
        os.chown(path, 65534, 65534, follow_symlinks=False)
    (folders[2] / WEIGHTS).chmod(0)
    for parent in [*tmp_path.parents, tmp_path]:
        parent.chmod(parent.stat().st_mode | 0o055)
    "a".encode("cp437")  # of zipfile; where Python itself is out of that user's reach, it could not be imported
    os.seteuid(65534)
    try:
        words = resume.decide(run).message
    finally:
        os.seteuid(0)
    assert "resumes from step 20" in words
    assert "__1_0.distcp cannot be read: Permission denied" in words


def test_a_link_to_nothing_is_no_start_from_scratch(run):
    """NeMo finds `step=29-last`, a link whose folder is gone, and says "Training from scratch"."""
    folders = saved(run)
    shutil.rmtree(folders[2])
    (run.path / resume.SAVED).unlink()  # as of an earlier version: only the link tells
    decided, _ = attempt_of(run)
    assert (decided.step, decided.lost_steps) == (20, 10)
    assert not (run.checkpoints / f"{folders[2].name}-last").is_symlink()


def test_after_all_were_deleted_the_run_does_not_begin_anew(run):
    """A scratch file system that purges old files leaves a run folder without checkpoints."""
    saved(run)
    attempt_of(run)
    shutil.rmtree(run.checkpoints)
    run.checkpoints.mkdir()
    with pytest.raises(resume.NoIntactCheckpointError, match="step 30 no longer exists, and there is no other"):
        resume.decide(run)
    (run.path / resume.SAVED).unlink()
    with pytest.raises(resume.NoIntactCheckpointError, match="step 30 no longer exists"):
        resume.decide(run)  # the last attempt's result says so too


def test_a_fresh_run_starts_at_step_1(run):
    decided, result = attempt_of(run)
    assert (decided.checkpoint, decided.message) == (None, "starts at step 1: no checkpoint yet")
    assert result["resume"]["step"] == 0
    assert attempt_of(run)[0].checkpoint is None, "an attempt that saved nothing changes nothing"


def test_a_save_that_was_killed_is_debris_and_not_damage(run):
    [folder] = saved(run, (10,))
    unfinished = made.write(run.checkpoints / "step=19-consumed_samples=160.0")
    (unfinished / "weights" / "metadata.json").unlink()
    unfinished.with_name(f"{unfinished.name}-unfinished").touch()
    decided, result = attempt_of(run)
    assert (decided.checkpoint, decided.damaged, result["resume"]["lost_steps"]) == (folder, (), 0)
    assert {path.name for path in run.checkpoints.iterdir()} == {folder.name, f"{folder.name}-last"}


def test_a_first_save_that_was_killed_leaves_a_fresh_run(run):
    unfinished = made.write(run.checkpoints / "step=9-last")
    truncate(unfinished)
    unfinished.with_name("step=9-last-unfinished").touch()
    assert attempt_of(run)[0].checkpoint is None


def test_a_marked_checkpoint_of_which_every_byte_is_there_is_taken(run):
    """The job was killed between the last byte and the removal of NeMo's mark."""
    saved(run, (10,))
    newest = made.write(run.checkpoints / "step=19-consumed_samples=160.0")
    newest.with_name(f"{newest.name}-unfinished").touch()
    decided, _ = attempt_of(run)
    assert decided.checkpoint == newest
    assert not list(run.checkpoints.glob("*-unfinished"))
    assert newest.is_dir()


def test_a_damaged_context_costs_no_step(run):
    folders = saved(run)
    (folders[2] / "context" / "io.json").write_text("{")
    assert attempt_of(run)[0].checkpoint == folders[2]
    assert checkpoint_files.check_sizes(folders[2]).problems != []


def test_a_damaged_manifest_condemns_nothing(run):
    folders = saved(run)
    part = folders[2] / manifest.FOLDER / "1.json"
    part.write_text(part.read_text().replace(str(manifest.record(folders[2] / WEIGHTS).crc), "7"))
    assert attempt_of(run)[0].checkpoint == folders[2]
    flip(WEIGHTS, 45)(folders[2])
    assert attempt_of(run)[0].checkpoint == folders[1], "torch's own checksum is left"


def test_a_second_copy_of_the_same_step_costs_nothing(run):
    """With NeMo's default, save_last=True, `-last` is a copy and not a link."""
    made.write(run.checkpoints / "step=9")
    copy = made.write(run.checkpoints / "step=9-last")
    truncate(copy)
    decided, result = attempt_of(run)
    assert (decided.step, result["resume"]["lost_steps"]) == (10, 0)


def test_what_was_set_aside_once_does_not_give_way_to_the_next(run):
    for _ in range(2):
        newest = made.write(run.checkpoints / "step=29")
        if not (run.checkpoints / "step=9").exists():
            made.write(run.checkpoints / "step=9")
        truncate(newest)
        attempt_of(run)
    assert sorted(path.name for path in (run.path / resume.DAMAGED).iterdir()) == ["step=29", "step=29.2"]


class Strategy:
    """Sizes as NeMo's strategy has them."""

    virtual_pipeline_model_parallel_size = None

    def __init__(self, tp: int, pp: int = 1) -> None:
        self.tensor_model_parallel_size, self.pipeline_model_parallel_size = tp, pp


def sharded(folder: Path) -> Path:
    """A checkpoint of TP 2 whose optimizer is cut as Megatron's `dp_reshardable` cuts it."""
    made.write(folder)
    tensors = {"decoder.weight": ((4, 6), [(4, 6)]), f"{resume_layout.SHARDED}0.gbuf.param": ((24,), [(24,)])}
    sizes = {file.name: file.stat().st_size for file in (folder / "weights").glob("*.distcp")}
    (folder / "weights" / ".metadata").write_bytes(made.pickled(tensors, sizes))
    return folder


def test_a_layout_that_cannot_be_loaded_is_refused_and_nothing_is_set_aside(run):
    """ "Wrong layout" of 14's damage matrix: the checkpoint is intact, so the run stops and says what would load it."""
    folder = sharded(run.checkpoints / "step=9")
    assert resume.decide(run).checkpoint == folder
    problem, hint = resume_layout.layout_problem(folder, Strategy(tp=1)) or ("", "")
    assert "is intact, but was saved with tensor_model_parallel_size 2, not 1" in problem
    assert "ckpt_optim_fully_reshardable=True" in hint
    assert resume_layout.layout_problem(folder, Strategy(tp=2)) is None


def test_a_layout_that_megatron_loads_is_let_pass(run):
    folder = made.write(run.checkpoints / "step=9")  # its optimizer is saved as tensors of the whole model
    assert resume_layout.layout_problem(folder, Strategy(tp=1, pp=2)) is None
    assert checkpoint_files.saved_layout(folder)["tensor_model_parallel_size"] == 2


EXPERT = "model.module.decoder.layers.0.mlp.experts.linear_fc1.weight0"
HALVES = [f"model.module.decoder.layers.0.mlp.linear_fc1.weight_{half}" for half in "wv"]


@pytest.mark.parametrize(("names", "loads"), [([EXPERT], False), (HALVES, True)])
def test_gated_experts_of_megatron_fsdp_keep_their_tensor_parallelism(run, names, loads):
    folder = made.write(run.checkpoints / "step=9")
    sizes = {file.name: file.stat().st_size for file in (folder / "weights").glob("*.distcp")}
    tensors = {name: ((4, 6), [(2, 6), (2, 6)]) for name in names}
    (folder / "weights" / ".metadata").write_bytes(made.pickled(tensors, sizes, fsdp=True))
    problem, hint = resume_layout.layout_problem(folder, Strategy(tp=1)) or ("", "")
    assert loads == (problem == "")
    assert loads or ("tensor_model_parallel_size 2, not 1" in problem and "the layout of the checkpoint" in hint)
    assert resume_layout.layout_problem(folder, Strategy(tp=2)) is None


def test_the_manifest_names_every_file_once(run):
    folder = made.write(run.checkpoints / "step=9", files=4)
    parts = [list(own_files(folder, rank, 2)) for rank in (0, 2)]
    names = sorted(file.relative_to(folder).as_posix() for part in parts for file in part)
    assert names == sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    assert [file.name for file in parts[1]] == ["__2_0.distcp", "__3_0.distcp"], "no node reads what another wrote"
    for number, part in enumerate(parts):
        manifest.write_part(folder, str(number), part)
    assert sorted(manifest.read(folder).records) == names
    assert checkpoint_files.check_all_bytes(folder) == []


def test_several_nodes_share_the_reading(run):
    [folder] = saved(run, (10,))
    flip(WEIGHTS, 45)(folder)
    flip("weights/common.pt", 36)(folder)
    contents = checkpoint_files.contents_of(folder).contents
    shares = [checkpoint_files.check_contents(folder, contents[share::3]) for share in range(3)]
    assert sorted(problem for share in shares for problem in share) == sorted(checkpoint_files.check_all_bytes(folder))
    assert len(checkpoint_files.check_all_bytes(folder)) == 2


def test_the_result_is_small_and_plain(run):
    folders = saved(run)
    truncate(folders[2])
    _, result = attempt_of(run)
    assert json.loads(json.dumps(result["resume"])) == {
        "step": 20,
        "checkpoint": folders[1].name,
        "samples": 160,
        "layout": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "ranks": 4},
        "verified": True,
        "lost_steps": 10,
        "set_aside": [
            {"checkpoint": folders[2].name, "step": 30, "why": "weights/__1_0.distcp has 119 bytes, 3 too few"}
        ],
        "words": result["resume"]["words"],
    }


def test_a_checkpoint_of_fsdp_dtensor_has_its_weights_at_the_top(run):
    folder = made.write(run.checkpoints / "step=9")
    (folder / "weights" / "metadata.json").unlink()
    for file in (folder / "weights").iterdir():
        file.rename(folder / file.name)
    (folder / "weights").rmdir()
    write_manifest(folder)
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "common.pt", "context/io.json"} == set(
        manifest.read(folder).records
    )
    assert resume.decide(run).checkpoint == folder
    flip("__1_0.distcp", 45)(folder)
    shutil.rmtree(folder / manifest.FOLDER)
    with pytest.raises(resume.NoIntactCheckpointError, match=r"__1_0\.distcp is corrupt between bytes"):
        resume.decide(run)


@pytest.mark.parametrize("name", ["weights/metadata.json", WEIGHTS])
def test_what_is_wrong_for_a_moment_costs_nothing(run, name):
    """A file that is missing at the first look and there at the second: file systems fail for moments."""
    newest = saved(run)[-1]
    hidden = run.path / "hidden"
    (newest / name).rename(hidden)
    looks = []

    def pause():
        looks.append(hidden.exists())
        if hidden.exists():
            hidden.rename(newest / name)

    assert resume.decide(run, pause=pause) == resume.Resume(newest)
    assert looks == [True]


def test_the_words_and_facts_of_a_decision(run):
    newest = saved(run)[-1]
    name = "step=29-consumed_samples=240.0"
    assert newest.name == name
    whole = resume.Resume(newest)
    assert whole.message == f"resumes from step 30, 240 samples into its data ({name}, verified)"
    assert (whole.facts()["step"], whole.facts()["samples"], whole.facts()["verified"]) == (30, 240, True)
    older = newest.with_name("step=19-consumed_samples=160.0")
    damaged = resume.CorruptCheckpoint(newest, "cut off")
    unknown = resume.CorruptCheckpoint(newest, "nobody knows", unreadable=True)
    after = resume.Resume(older, (damaged,), gone=40, is_verified=False)
    assert after.lost_steps == 20
    assert after.message == (
        f"resumes from step 20, 160 samples into its data ({older.name}, unverified: it has no complete manifest); "
        f"{name} is corrupt and was moved to damaged/: cut off; the checkpoint saved at step 40 no longer exists; "
        "20 steps are lost and will be trained again"
    )
    assert after.facts()["set_aside"] == [{"checkpoint": name, "step": 30, "why": "cut off"}]
    stays = resume.Resume(older, (unknown,), gone=30, doubt="files of two saves", is_verified=False)
    assert "unverified: files of two saves" in stays.message
    assert "cannot be read and is kept: nobody knows" in stays.message
    assert "no longer exists" not in stays.message
    assert (stays.lost_steps, stays.facts()["set_aside"]) == (10, [])
    fresh = resume.Resume(None)
    assert (fresh.message, fresh.step, fresh.lost_steps) == ("starts at step 1: no checkpoint yet", 0, 0)
    facts = fresh.facts()
    assert (facts["checkpoint"], facts["samples"], facts["layout"], facts["verified"]) == (None, None, {}, None)


def test_three_damaged_checkpoints_are_named_as_two_and_one_more(run):
    for folder in saved(run):
        half(folder)
    with pytest.raises(resume.NoIntactCheckpointError, match="none of its 3 checkpoints is intact") as refused:
        resume.decide(run)
    assert str(refused.value).endswith("; and 1 more")
    shutil.rmtree(run.checkpoints / "step=9-consumed_samples=80.0")
    with pytest.raises(resume.NoIntactCheckpointError, match="none of its 2 checkpoints is intact") as refused:
        resume.decide(run)
    assert "more" not in str(refused.value)
