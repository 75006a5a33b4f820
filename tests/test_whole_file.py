"""A file is the old one or the new one, whole."""

import os
import stat
from pathlib import Path

import pytest

from superpod.common import whole_file


def test_a_file_is_replaced_whole_with_its_permissions(tmp_path):
    path = tmp_path / "a file's.prom"
    whole_file.write(path, "old")
    whole_file.write(path, "new ä\n", mode=0o644)
    assert path.read_text(encoding="utf-8") == "new ä\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert os.listdir(tmp_path) == [path.name]


def test_a_failure_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    whole_file.write(path, "old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        whole_file.write(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_device_is_written_to():
    with pytest.raises(OSError, match="No space left"):
        whole_file.write(Path("/dev/full"), "text")
