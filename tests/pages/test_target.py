"""Output files of pages and traces: own files are replaced atomically, other files are refused."""

import gzip
import os

import pytest

from superpod.errors import UserError
from superpod.pages import GENERATOR, target
from tests.conftest import fill

OURS = f'<meta name="generator" content="{GENERATOR} 1">'


def test_a_new_file_and_an_own_file_are_written(tmp_path):
    path = tmp_path / "plan.html"
    target.check(path, "--html", target.PAGE)
    target.write(path, OURS, "--html")
    target.check(path, "--html", target.PAGE)
    target.write(path, OURS + "again", "--html")
    assert path.read_text().endswith("again")
    assert os.listdir(tmp_path) == ["plan.html"]


def test_a_compressed_trace_is_recognized(tmp_path):
    path = tmp_path / "step.json.gz"
    target.write(path, '{"otherData": {"generator": "superpod-recipes"}}', "--trace")
    assert GENERATOR in gzip.decompress(path.read_bytes()).decode()
    target.check(path, "--trace", target.TRACE)


@pytest.mark.parametrize(
    ("make", "name", "says"),
    [
        (lambda p: p.write_text("mine"), "plan.html", "not written by `recipes`"),
        (lambda p: p.write_bytes(b"\x1f\x8bno gzip"), "plan.html", "not written by"),
        (lambda p: p.mkdir(), "plan.html", "is a folder"),
        (lambda p: os.mkfifo(p), "plan.html", "not written by"),
        (lambda p: None, "plan.txt", "ending with .html"),
        (lambda p: None, "none/plan.html", "does not exist"),
        (lambda p: None, "x" * 300 + ".html", "cannot be written"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_unsuitable_paths_are_refused(tmp_path, make, name, says):
    path = tmp_path / name
    make(path)
    with pytest.raises(UserError, match=says) as refused:
        target.check(path, "--html", target.PAGE)
    assert refused.value.hint


def test_a_full_disk_keeps_the_old_page(small_disk):
    path = small_disk / "plan.html"
    target.write(path, OURS, "--html")
    fill(small_disk)
    with pytest.raises(UserError, match="cannot be written"):
        target.write(path, OURS * 100_000, "--html")
    assert path.read_text() == OURS
    assert sorted(os.listdir(small_disk)) == ["filler", "plan.html"]
