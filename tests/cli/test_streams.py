"""Invalid terminal sizes, encodings that lack characters, and a closed stdout."""

import io
import os
import sys

import pytest

from superpod.cli import streams
from superpod.errors import UserError


@pytest.mark.parametrize(("claim", "kept"), [("0", False), ("3", False), ("²", False), ("9" * 30, False), ("60", True)])
def test_an_invalid_terminal_size_is_ignored(claim, kept, monkeypatch):
    monkeypatch.setenv("COLUMNS", claim)
    streams.prepare()
    assert (os.environ.get("COLUMNS") == claim) is kept


def test_a_table_is_printed_with_zero_columns(recipes_cli):
    words = ("memory", "llama3_8b_pretrain_h100_bf16")
    done = recipes_cli(*words, env={"COLUMNS": "0"})
    assert done.returncode == 0, done.stderr
    assert "TP2 SP" in done.stdout


@pytest.mark.parametrize(
    ("encoding", "text", "shown"),
    [("ascii", "lläma ─", b"ll?ma ?"), ("latin-1", "ä ─", b"\xe4 ?"), ("utf-8", "ä\udcff", b"\xc3\xa4\\udcff")],
)
def test_unencodable_characters_are_replaced(encoding, text, shown, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    streams.prepare()
    print(text, end="", flush=True)
    assert written.getvalue() == shown


def test_a_closed_stdout_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(UserError, match="stdout is closed"):
        streams.prepare()
