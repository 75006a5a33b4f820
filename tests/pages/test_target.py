"""Where pages and traces are written: our own files are replaced, others' are not, and nothing is half-written."""

import gzip
import os

import pytest

from superpod.errors import UserError
from superpod.pages import GENERATOR, target
from tests.conftest import fill

OURS = f'<meta name="generator" content="{GENERATOR} 1">'


def test_a_new_file_and_one_of_ours_are_written(tmp_path):
    path = tmp_path / "plan.html"
    target.check(path, "--html", target.PAGE)
    target.write(path, OURS, "--html")
    target.check(path, "--html", target.PAGE)
    target.write(path, OURS + "again", "--html")
    assert path.read_text().endswith("again")
    assert os.listdir(tmp_path) == ["plan.html"]


def test_a_compressed_trace_of_ours_is_known(tmp_path):
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
def test_what_cannot_be_written_is_refused_with_the_reason(tmp_path, make, name, says):
    path = tmp_path / name
    make(path)
    with pytest.raises(UserError, match=says) as refused:
        target.check(path, "--html", target.PAGE)
    assert refused.value.hint


def test_a_full_disk_leaves_the_old_page(small_disk):
    path = small_disk / "plan.html"
    target.write(path, OURS, "--html")
    fill(small_disk)
    with pytest.raises(UserError, match="cannot be written"):
        target.write(path, OURS * 100_000, "--html")
    assert path.read_text() == OURS
    assert sorted(os.listdir(small_disk)) == ["filler", "plan.html"]
