"""Output files are checked before the work and written atomically."""

from pathlib import Path

import pytest

from superpod.common import output_file
from superpod.errors import UserError


def test_an_existing_file_is_replaced_only_with_force(tmp_path):
    path = tmp_path / "cluster.toml"
    output_file.check_new(path, "--to", force=False)
    path.touch()
    output_file.check_new(path, "--to", force=True)
    with pytest.raises(UserError, match="already exists") as refused:
        output_file.check_new(path, "--to", force=False)
    assert "--force" in refused.value.hint


def test_a_dangling_link_counts_as_an_existing_file(tmp_path):
    (tmp_path / "link").symlink_to("gone")
    with pytest.raises(UserError, match="already exists"):
        output_file.check_new(tmp_path / "link", "--to", force=False)


@pytest.mark.parametrize("name", ["folder", "none/file", "x" * 300])
def test_an_unsuitable_path_is_refused(tmp_path, name):
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=r"^--out "):
        output_file.check_new(tmp_path / name, "--out", force=True)


def test_a_device_is_written_directly():
    output_file.check(Path("/dev/null"), "--out", lambda *_: False, to_devices=True)
    output_file.write(Path("/dev/null"), "text", "--out")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(UserError, match="--out /dev/full cannot be written: No space left"):
        output_file.write(Path("/dev/full"), "text", "--out")
    with pytest.raises(UserError, match="was not written by"):
        output_file.check(Path("/dev/null"), "--out", lambda *_: False)


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "mine.py"
    path.write_text("first")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(UserError, match="No space left"):
        output_file.write(path, "second", "--to")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]
