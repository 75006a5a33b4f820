"""Test user templates: checks without transformers, and copies."""

import json
import sys

import pytest

pytest.importorskip("jinja2", reason="the [nemo] extra is not installed")

from superpod.data.samples import chat_template
from superpod.errors import UserError

GOOD = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"


def test_accepts_tags_of_transformers(tmp_path):
    (tmp_path / "a.jinja").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert chat_template.read(tmp_path / "a.jinja") == GOOD
    assert chat_template.marks_answers(GOOD)
    assert not chat_template.marks_answers(GOOD.replace("generation", "x"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{% for m in messages %}", "a.jinja:1: Unexpected end of template"),
        (b"messages\n{{ messages", "a.jinja:2: "),
        (b"{{ messages | nothing }}", "No filter named 'nothing'"),
        (b"{% include 'x' %}{% unknown %}", "unknown tag 'unknown'"),
        (b"hello", "does not use `messages`"),
        (b"", "does not use `messages`"),
        (b"\xff\xfe{", "is not UTF-8 at byte 0"),
        (b"{{ messages }}" + b" " * (1 << 20), "is longer than 1 MiB"),
        (b"{{" + b"(" * 50_000 + b"messages", "a.jinja"),
    ],
    ids=range(9),
)
def test_refuses_invalid_template(content, says, tmp_path):
    (tmp_path / "a.jinja").write_bytes(content)
    with pytest.raises(UserError, match=says):
        chat_template.read(tmp_path / "a.jinja")
    assert "transformers" not in sys.modules or "torch" in sys.modules


def test_copies_folder_with_new_template(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    for name in ("tokenizer.json", "config.json", "generation_config.json"):
        (kept / name).write_text("{}")
    (kept / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old", "eos_token": "é"}))
    (kept / "chat_template.jinja").write_text("old")
    out = chat_template.copy_tokenizer_with_template(kept, GOOD, tmp_path / "data" / "tokenizer")
    assert sorted(file.name for file in out.iterdir()) == sorted(file.name for file in kept.iterdir())
    assert (out / "chat_template.jinja").read_text() == GOOD
    assert json.loads((out / "tokenizer_config.json").read_text()) == {"eos_token": "é"}
    assert (kept / "chat_template.jinja").read_text() == "old"


def test_template_size_limit(tmp_path):
    file = tmp_path / "a.jinja"
    file.write_text("{{ messages }}".ljust(1 << 20))
    assert len(chat_template.read(file)) == 1 << 20
    file.write_text("{{ messages }}".ljust((1 << 20) + 1))
    with pytest.raises(UserError, match="is longer than 1 MiB"):
        chat_template.read(file)
    for path in (tmp_path, tmp_path / "none.jinja"):
        with pytest.raises(UserError, match="is not a file"):
            chat_template.read(path)
