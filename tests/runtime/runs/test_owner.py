"""What another user could have written is not executed: folders, runs, imported models, caches (issue 25)."""

import os
import pickle
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from superpod.errors import UserError
from superpod.runtime.attempts import model_steps
from superpod.runtime.rank import rank
from superpod.runtime.runs import owner
from superpod.runtime.runs.run_folder import RunFolder

OTHER = 12345
ME = owner.user_name(os.geteuid())
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


def give(path: Path) -> None:
    os.chown(path, OTHER, OTHER, follow_symlinks=False)


@pytest.fixture
def shared(tmp_path) -> Path:
    """A folder for runs as the documentation recommends it."""
    runs = tmp_path / "runs"
    runs.mkdir()
    runs.chmod(0o3775)
    return runs


@pytest.fixture
def run(shared) -> RunFolder:
    return RunFolder.create(shared, "tiny", facts={"max_steps": 5}, recipe_lines=[])


@needs_root
@pytest.mark.parametrize("what", ["folder", "link to a folder", "link to nothing", "file"])
def test_a_name_that_another_user_has_taken_is_not_used(shared, tmp_path, what):
    taken = shared / "tiny"
    if what == "folder":
        taken.mkdir()
    elif what == "file":
        taken.touch()
    else:
        taken.symlink_to(tmp_path if what == "link to a folder" else tmp_path / "nothing")
    give(taken)
    assert owner.folder_in(shared, "tiny") == shared / f"tiny.{ME}"
    run = RunFolder.create(shared, "tiny", facts={}, recipe_lines=[])
    assert run.path.parent == shared / f"tiny.{ME}"
    assert run.recipe == "tiny"
    assert RunFolder.latest(shared, "tiny") == run
    owner.refuse_unsafe(run.path)


@needs_root
def test_where_both_names_are_taken_nothing_is_made(shared):
    for name in ("tiny", f"tiny.{ME}"):
        (shared / name).mkdir()
        give(shared / name)
    with pytest.raises(
        UserError, match=f"cannot create a folder for you in .*tiny belongs to {OTHER}, tiny.{ME} belongs"
    ):
        RunFolder.create(shared, "tiny", facts={}, recipe_lines=[])


@needs_root
def test_the_owner_of_the_folder_for_runs_is_trusted(shared):
    (shared / "tiny").mkdir()
    give(shared)
    give(shared / "tiny")
    assert owner.folder_in(shared, "tiny") == shared / "tiny"


@pytest.mark.parametrize("mode", [0o777, 0o2775])
def test_a_folder_for_runs_without_the_sticky_bit_is_refused(shared, mode):
    """Everybody who may write there could rename a run, and put another in its place."""
    shared.chmod(mode)
    if not mode & 0o002:
        os.chown(shared, -1, OTHER)
    with pytest.raises(UserError, match=f"is writable by .* \\(mode {mode:o}\\)") as refused:
        RunFolder.create(shared, "tiny", facts={}, recipe_lines=[])
    assert f"chmod +t {shared}" in refused.value.hint
    assert [*shared.iterdir()] == []


def test_a_group_of_nobody_else_may_write(shared, monkeypatch):
    """As with umask 0002 where every user has a group of that name."""
    shared.chmod(0o775)
    group = SimpleNamespace(gr_name=ME, gr_mem=[])
    monkeypatch.setattr(owner.grp, "getgrgid", lambda gid: group)
    assert owner.folder_in(shared, "tiny") == shared / "tiny"
    group.gr_mem = [ME, "bob"]
    with pytest.raises(UserError, match="is writable by its group"):
        owner.folder_in(shared, "tiny")


def test_a_run_of_before_is_trained_where_nobody_else_could_write(run):
    (run.path / "code").mkdir()
    (run.path / "job.sbatch").touch()
    owner.refuse_unsafe(run.path)


@pytest.mark.parametrize("name", ["", "run.json", "job.sbatch", "attempts", "checkpoints"])
def test_a_run_that_others_may_write_to_is_refused(run, name):
    path = run.path / name
    if not path.exists():
        path.touch()
    os.chown(path, -1, OTHER)
    path.chmod(stat.S_IMODE(path.stat().st_mode) | 0o020)
    with pytest.raises(UserError, match="is writable by its group") as refused:
        owner.refuse_unsafe(run.path)
    assert refused.value.hint.endswith(f"`chmod -R go-w {path}`")


@pytest.mark.parametrize("name", ["", "weights", "weights/common.pt", "weights/__0_0.distcp", "context/io.json"])
def test_a_checkpoint_that_others_may_write_to_is_refused(run, name):
    """Also where nobody else may write into the run: a checkpoint may be elsewhere, and linked."""
    checkpoint = run.path / "elsewhere"
    for part in ("weights/.metadata", "weights/common.pt", "weights/__0_0.distcp", "context/io.json"):
        (checkpoint / part).parent.mkdir(parents=True, exist_ok=True)
        (checkpoint / part).touch()
    link = run.checkpoints / "step=1-last"
    link.symlink_to(checkpoint)
    owner.refuse_unsafe_checkpoint(link)
    (checkpoint / name).chmod(0o777)
    with pytest.raises(owner.UnsafeError, match="is writable by everyone"):
        owner.refuse_unsafe_checkpoint(link)


@needs_root
@pytest.mark.parametrize("name", [".", "checkpoints", ".."])
def test_a_run_of_which_a_part_is_another_s_is_refused(run, name):
    give(run.path / name)
    with pytest.raises(UserError, match=f"belongs to {OTHER}"):
        owner.refuse_unsafe(run.path)


@needs_root
def test_a_link_of_another_user_in_place_of_a_run_is_refused(run, shared):
    (shared / "other").mkdir()
    give(shared / "other")
    link = shared / "other" / run.path.name
    link.symlink_to(run.path)
    with pytest.raises(UserError, match=f"{link.parent} belongs to {OTHER}"):
        owner.refuse_unsafe(link)
    os.chown(link.parent, 0, 0)
    give(link)
    with pytest.raises(UserError, match=f"{link} belongs to {OTHER}"):
        owner.refuse_unsafe(link)


@needs_root
@pytest.mark.parametrize(("key", "place"), [("base", ".models/llama-abc"), ("packed", ".samples/x1/data")])
def test_a_model_or_samples_that_another_user_has_placed_are_refused(shared, key, place):
    folder = shared / place
    folder.mkdir(parents=True)
    run = RunFolder.create(shared, "tiny", facts={key: str(folder)}, recipe_lines=[])
    model_steps.refuse_unsafe_inputs(run)
    owned = shared.joinpath(*Path(place).parts[:2])
    give(owned)
    with pytest.raises(UserError, match=f"belongs to {OTHER}"):
        model_steps.refuse_unsafe_inputs(run)
    os.chown(owned, 0, 0)
    give(owned.parent)
    with pytest.raises(UserError, match=f"belongs to {OTHER}"):
        model_steps.refuse_unsafe_inputs(run)


class Hostile:
    def __reduce__(self) -> Any:
        return os.system, ("touch pwned",)


@needs_root
def test_sample_indices_that_another_user_could_write_are_not_loaded(tmp_path, monkeypatch):
    """numpy executes such a file, mapped or not, as Megatron loads it."""
    import numpy as np

    monkeypatch.chdir(tmp_path)
    cache = tmp_path / "data" / "index_cache" / "0123456789ab"
    cache.mkdir(parents=True)
    (cache / "x.npy").write_bytes(pickle.dumps(Hostile()))
    np.load(cache / "x.npy", allow_pickle=True, mmap_mode="r")
    assert (tmp_path / "pwned").exists()

    def where() -> str:
        partial: Any = SimpleNamespace(data=SimpleNamespace(index_mapping_dir=str(cache)))
        rank._protect_indices(partial, tmp_path / "run")
        return partial.data.index_mapping_dir

    assert where() == str(cache)
    for folder in (cache, cache.parent, cache.parent.parent):
        give(folder)
        assert where() == str(tmp_path / "run" / "index_cache"), folder
        os.chown(folder, 0, 0)
        folder.chmod(0o777)
        assert where() == str(tmp_path / "run" / "index_cache"), folder
        folder.chmod(0o755)
    rank._protect_indices(SimpleNamespace(data=SimpleNamespace()), tmp_path)


def test_files_are_never_made_for_others_to_write(tmp_path):
    before = os.umask(0)
    try:
        with owner.restrict_umask():
            (tmp_path / "folder").mkdir()
            (tmp_path / "file").touch()
        assert os.umask(0) == 0
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("folder", "file")] == [0o755, 0o644]


@needs_root
def test_a_resolved_run_that_another_user_has_cached_is_not_read(tmp_path, monkeypatch):
    """XDG_CACHE_HOME may be shared; the file holds the source of the recipe, which the job executes."""
    from superpod.collection import installed
    from superpod.requests import resolve
    from superpod.requests.request import Request

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(installed, "missing_package", lambda: "")
    monkeypatch.setattr(resolve, "_cache_key", lambda _request: "key")
    monkeypatch.setattr(resolve, "resolve", lambda _request: 1 / 0)
    path = resolve.cache_folder() / "key.json"
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    read: list[Path] = []
    monkeypatch.setattr(Path, "read_bytes", lambda self: read.append(self) or b"{}")
    for another_s in (False, True):
        if another_s:
            give(path)
        read.clear()
        with pytest.raises(ZeroDivisionError):  # built: the file holds no run
            resolve.resolve_cached(Request("tiny_llama3"))
        assert read == ([] if another_s else [path])


@needs_root
def test_a_file_that_another_user_has_made_in_shared_memory_is_not_used(tmp_path):
    from superpod.runtime.heartbeat import node_board

    path = tmp_path / "board"
    path.touch(0o666)
    give(path)
    with pytest.raises(PermissionError):
        node_board._open_locked(path, 4096)
