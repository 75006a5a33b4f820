import json

import pytest

from superpod.data.samples import samples
from superpod.data.samples.samples import Sample
from superpod.errors import UserError


def written(folder, *lines):
    file = folder / "data.jsonl"
    file.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return file


def chat(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def test_kinds_and_line_numbers(tmp_path):
    messages = chat(("system", "short"), ("user", "2+2?"), ("assistant", "4"))
    first = b'\xef\xbb\xbf{"prompt": "2+2=", "completion": "4"}\r'  # as Windows begins a file, and ends a line
    assert samples.read_samples(written(tmp_path, first, b"  ", {"completion": "4", "prompt": "", "id": 7})) == [
        Sample(1, "2+2=4", 4),
        Sample(3, "4", 0),
    ]
    assert samples.read_samples(written(tmp_path, {"text": "four", "id": 7})) == [Sample(1, "four", 0)]
    [chatted] = samples.read_samples(written(tmp_path, b"", b"", b"", messages))
    assert (chatted.line, chatted.messages) == (4, tuple(messages["messages"]))


WRONG = [
    (b"\xff\xfe{}", "not UTF-8 at byte 0"),
    (b'{"text": ', "not JSON: "),
    (b"[" * 100_000, "not JSON: "),
    ([1], "not a JSON object but a list"),
    ({}, "has the keys none"),
    ({"instruct": "a", "output": "b"}, "has the keys 'instruct', 'output'"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "has a chosen and a rejected answer"),
    (b'{"text": "a", "text": "b"}', "has the key 'text' twice"),
    (b'{"text": "\x00"}', "not JSON: it contains NUL bytes"),
    (b'{"text": "fi', "not JSON: .*truncated"),
    (
        {"text": "a", "prompt": "b", "completion": "c"},
        "has the keys 'text', 'prompt', 'completion', which belong to several sample formats",
    ),
    (b'{"text": "\\ud800 hi"}', "text contains an unpaired surrogate"),
    ({"prompt": "a", "completion": " "}, "completion is empty"),
    ({"prompt": ["a"], "completion": "b"}, r"prompt\[0\] is a string, not an object"),
    ({"text": None}, "text is null, not a string"),
    ({"messages": []}, r"messages is empty \(\[\]\), not a list of messages"),
    ({"messages": ["hello"]}, r"messages\[0\] is a string, not an object"),
    (chat(("user", "a"), ("robot", "b")), r"messages\[1\]: role 'robot' must be one of system, user, assistant, tool"),
    (chat(("user", "a"), ("assistant", 3)), r"messages\[1\]: content is a number, not a string"),
    (chat(("user", "a"), ("system", "b"), ("assistant", "c")), r"messages\[1\]: a system message must be the first"),
    (chat(("user", "a"), ("assistant", "")), "no assistant message has content"),
    (chat(("user", "a"), ("assistant", "b")) | {"tools": 3}, "tools is not a list of objects"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        r".*content\[0\] is image_url, but only text",
    ),
    ({"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}, ".*weight 0.5 is neither 0 nor 1"),
    ({"messages": [{"role": "assistant", "content": "a", "weight": 0}]}, "no assistant message has content"),
    (
        {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{"}}]},
        ".*the arguments of f are not",
    ),
    ({"instruction": "a", "output": "b", "history": [["c"]]}, "history is not a list of pairs"),
]


@pytest.mark.parametrize(("line", "says"), WRONG, ids=[says for _, says in WRONG])
def test_reports_invalid_line(line, says, tmp_path):
    file = written(tmp_path, {"text": "fine"}, line)
    with pytest.raises(UserError, match=f"data.jsonl:2: {says}") as refused:
        samples.read_samples(file)
    assert '{"prompt": ..., "completion": ...}' in refused.value.hint


def test_counts_bad_lines(tmp_path):
    with pytest.raises(UserError) as refused:
        samples.read_samples(written(tmp_path, *[{}] * 10))
    assert [line.split(": ")[0].rpartition(":")[2] for line in str(refused.value).splitlines()[:3]] == ["1", "2", "3"]
    assert str(refused.value).splitlines()[3:] == ["and 7 more lines"]


def test_refuses_missing_and_empty_file(tmp_path):
    for path, says in (
        (tmp_path / "none.jsonl", "is not a file"),
        (tmp_path, "is not a file"),
        (written(tmp_path), "no sam"),
    ):
        with pytest.raises(UserError, match=says):
            samples.read_samples(path)
