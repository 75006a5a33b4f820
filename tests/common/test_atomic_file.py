"""Atomic writes of files."""

import os
import stat

import pytest

from superpod.common import atomic_file


def test_a_file_is_replaced_with_its_permissions(tmp_path):
    path = tmp_path / "a file's.prom"
    atomic_file.write(path, "old")
    atomic_file.write(path, "new ä\n", permissions=0o644)
    assert path.read_text(encoding="utf-8") == "new ä\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert os.listdir(tmp_path) == [path.name]


def test_a_failure_keeps_the_old_file_and_removes_the_temporary_one(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    atomic_file.write(path, "old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        atomic_file.write(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_while_writing_keeps_the_old_file(tmp_path, error):
    path = tmp_path / "rows.csv"
    path.write_text("old")

    def stop():
        with atomic_file.open_atomically(path, "w", encoding="utf-8") as stream:
            stream.write("half of it")
            raise error

    with pytest.raises(error):
        stop()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["rows.csv"]


def test_a_link_is_replaced_but_not_its_target(tmp_path):
    (tmp_path / "target").write_text("theirs")
    (tmp_path / "link").symlink_to("target")
    atomic_file.write(tmp_path / "link", "ours")
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "theirs"
