import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superpod.common import locks
from superpod.common.json_files import append_line, read_json, read_lines, tail_lines
from superpod.runtime.heartbeat import heartbeat_pages
from tests.conftest import fill


@given(torn=st.binary(max_size=40), records=st.lists(st.dictionaries(st.text(max_size=5), st.integers()), max_size=4))
def test_lines_after_an_incomplete_line_are_read(torn, records, tmp_path_factory):
    path = tmp_path_factory.mktemp("lines") / "m.jsonl"
    path.write_bytes(torn)
    for record in records:
        append_line(path, record)
    lines = read_lines(path)
    assert lines[len(lines) - len(records) :] == records


def test_a_line_that_does_not_fit_is_removed(small_disk):
    path = small_disk / "m.jsonl"
    append_line(path, {"step": 1})
    fill(small_disk)
    with pytest.raises(OSError, match="No space left"):
        append_line(path, {"text": "x" * 20_000})
    assert path.read_text() == '{"step": 1}\n'


@pytest.mark.parametrize("read", [read_json, read_lines, tail_lines, locks.is_held])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_reading_a_special_file_does_not_block(tmp_path, read, kind):
    """A pipe would block readers, and /dev/zero has no end."""
    path = tmp_path / "x"
    {"pipe": os.mkfifo, "folder": os.mkdir, "device": lambda path: os.symlink("/dev/zero", path)}[kind](path)
    signal.alarm(5)  # a read that waits ends this test, and pytest with it
    try:
        assert not read(path)
    finally:
        signal.alarm(0)


def test_reading_heartbeats_from_a_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / heartbeat_pages.NAME)
    signal.alarm(5)
    try:
        assert heartbeat_pages.read_ranks(tmp_path) == {}
    finally:
        signal.alarm(0)
