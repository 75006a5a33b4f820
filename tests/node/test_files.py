import pytest
from hypothesis import given
from hypothesis import strategies as st

from superpod.node.files import append_line, read_lines
from tests.conftest import fill


@given(torn=st.binary(max_size=40), records=st.lists(st.dictionaries(st.text(max_size=5), st.integers()), max_size=4))
def test_what_is_appended_after_a_torn_write_is_read_back(torn, records, tmp_path_factory):
    path = tmp_path_factory.mktemp("lines") / "m.jsonl"
    path.write_bytes(torn)
    for record in records:
        append_line(path, record)
    lines = read_lines(path)
    assert lines[len(lines) - len(records) :] == records


def test_a_line_that_does_not_fit_is_taken_back(small_disk):
    path = small_disk / "m.jsonl"
    append_line(path, {"step": 1})
    fill(small_disk)
    with pytest.raises(OSError, match="No space left"):
        append_line(path, {"text": "x" * 20_000})
    assert path.read_text() == '{"step": 1}\n'
