"""Test the conversion of rows with different keys to samples."""

import json

import pytest

from superpod.data.samples import samples
from superpod.data.samples.sample_kinds import Keys, convert_row
from superpod.data.samples.samples import ReadOptions
from superpod.errors import UserError

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


def chat(*messages):
    return [{"role": role, "content": content} for role, content in messages]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"question": "q", "answer": "a"}, [USER, ANSWER]),
        ({"input": "q", "output": "a"}, [USER, ANSWER]),
        ({"instruction": "q", "output": "a"}, [USER, ANSWER]),
        ({"instruction": "q", "input": "", "output": "a", "id": 3}, [USER, ANSWER]),
        ({"instruction": "sum", "input": "2 2", "output": "4"}, chat(("user", "sum\n\n2 2"), ("assistant", "4"))),
        (
            {"instruction": "q", "output": "a", "system": "s", "history": [["x", "y"]]},
            chat(("system", "s"), ("user", "x"), ("assistant", "y"), ("user", "q"), ("assistant", "a")),
        ),
        (
            {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"},
                               {"from": "gpt", "value": "a"}]},
            [{"role": "system", "content": "s"}, USER, ANSWER],
        ),
        ({"conversations": [USER, ANSWER], "system": "s"}, [{"role": "system", "content": "s"}, USER, ANSWER]),
        (
            {"messages": [{"role": "developer", "content": "s"}, USER, ANSWER]},
            [{"role": "system", "content": "s"}, USER, ANSWER],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "text", "text": "!"}]},
                          ANSWER], "parallel_tool_calls": False},
            [{"role": "user", "content": "q!"}, ANSWER],
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [
                {**CALL, "function": {"name": "add", "arguments": '{"a": 2}'}}]},
                {"role": "tool", "tool_call_id": "1", "content": "4"}, ANSWER]},
            [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]},
             {"role": "tool", "content": "4", "tool_call_id": "1"}, ANSWER],
        ),
        (
            {"messages": [USER, {"role": "assistant", "function_call": {"name": "f", "arguments": ""}},
                          {"role": "function", "name": "f", "content": "4"}, ANSWER]},
            [USER, {"role": "assistant", "content": "",
                    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]},
             {"role": "tool", "content": "4", "name": "f"}, ANSWER],
        ),
        ({"prompt": [USER], "completion": [ANSWER]}, [USER, ANSWER]),
    ],
    ids=range(13),
)  # fmt: skip
def test_all_kinds_of_chats(row, messages):
    _, made = convert_row(1, row, Keys())
    assert list(made.messages) == messages
    assert made.masked == ()


def test_prompts_and_texts_are_unchanged():
    for row, prompt in (
        ({"prompt": "q ", "completion": "a"}, 2),
        ({"prompt": "q ", "response": "a"}, 2),
        ({"text": "q a"}, 0),
    ):
        _, made = convert_row(1, row, Keys())
        assert (made.text, made.prompt, made.messages) == ("q a", prompt, ())


def test_masks_weight_0_and_prompt_answers():
    masked = {"role": "assistant", "content": "x", "weight": 0}
    _, made = convert_row(1, {"messages": [USER, masked, USER, {**ANSWER, "weight": 1}]}, Keys(), system="s")
    assert (made.messages[0]["content"], made.masked) == ("s", (2,))
    _, made = convert_row(1, {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}, Keys())
    assert made.masked == (1,)


def test_adds_system_prompt():
    _, made = convert_row(1, {"question": "q", "answer": "a"}, Keys(), system="short")
    assert made.messages[0] == {"role": "system", "content": "short"}
    _, made = convert_row(1, {"messages": [{"role": "system", "content": "own"}, USER, ANSWER]}, Keys(), system="short")
    assert made.messages[0]["content"] == "own"


def test_parses_tools():
    tools = [{"type": "function", "function": {"name": "f"}}]
    for given in (tools, json.dumps(tools)):
        _, made = convert_row(1, {"messages": [USER, ANSWER], "tools": given}, Keys())
        assert list(made.tools) == tools


@pytest.mark.parametrize(
    ("keys", "row", "kind"),
    [
        (["prompt=query", "completion=reply"], {"query": "q", "reply": "a", "text": "other"}, "prompt"),
        (["question=query", "answer=a=b"], {"query": "q", "a=b": "a"}, "question"),
        (["text=text"], {"text": "a", "prompt": "q", "completion": "b"}, "text"),
        (["messages=chat", "role=who", "content=what"], {"chat": [{"who": "assistant", "what": "a"}]}, "messages"),
        (["instruction=task", "input=given"], {"task": "q", "given": "x", "output": "a"}, "instruction"),
        (["prompt=query"], {"messages": [USER, ANSWER]}, "messages"),  # of another file
    ],
)
def test_replaced_keys_select_the_kind(keys, row, kind):
    assert convert_row(1, row, Keys(keys))[0] == kind


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["prompt"], "--key 'prompt' is not NAME=KEY"),
        (["=x"], "is not NAME=KEY"),
        (["promt=x"], "is not NAME=KEY"),
        (["text="], "is not NAME=KEY"),
        (["text=a", "text=b"], "--key text is given twice"),
        (["text=a", "answer=b"], "--key renames answer, text, but no sample format has all of these keys"),
    ],
)
def test_refuses_invalid_keys(keys, says):
    with pytest.raises(UserError, match=says):
        ReadOptions(tuple(keys)).check()


def test_refuses_mixed_kinds(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(UserError, match=r"a.jsonl:3: has prompt and completion, but line 1 has text"):
        samples.read_samples(tmp_path / "a.jsonl")


GOOD, BAD = '{"prompt": "a", "completion": "b"}\n', '{"prompt": "a"\n{"prompt": "a", "completion": ""}\n\xff\n'


def test_skips_and_stores_bad_lines(tmp_path):
    path, keep = tmp_path / "a.jsonl", tmp_path / "skipped.jsonl"
    path.write_bytes((GOOD * 97 + BAD).encode("latin-1"))
    bad = samples.BadLines(ReadOptions(skip=True), keep)
    good = list(samples.stream_samples([path], bad))
    bad.check(len(good), "a.jsonl")
    assert (len(good), bad.count) == (97, 3)
    assert bad.summary.startswith("1 x not JSON: ")
    kept = [json.loads(line) for line in keep.read_text().splitlines()]
    assert [(row["line"], row["text"]) for row in kept] == [
        (98, '{"prompt": "a"'),
        (99, '{"prompt": "a", "completion": ""}'),
        (100, "\\xff"),
    ]
    assert kept[2]["reason"] == "not UTF-8 at byte 0"


@pytest.mark.parametrize(
    ("good", "share", "says"),
    [
        (10, 0.05, r"3 of 13 lines are bad \(23.1%\), but --max-bad-share is 0.05: 1 x not JSON"),
        (97, 0.0, "3 of 100 lines are bad"),
        (0, 1.0, "3 of 3 lines are bad"),
    ],
)
def test_refuses_too_many_bad_lines(good, share, says, tmp_path):
    (tmp_path / "a.jsonl").write_bytes((GOOD * good + BAD).encode("latin-1"))
    with pytest.raises(UserError, match=says):
        samples.read_samples(tmp_path / "a.jsonl", ReadOptions(skip=True, max_bad_share=share))


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_refuses_invalid_share(share):
    with pytest.raises(UserError, match="must be between 0 and 1"):
        ReadOptions(max_bad_share=share).check()
