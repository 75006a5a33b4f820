"""Which tokens a model learns, seen by decoding them. Needs transformers, as the [nemo] extra has it."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from superpod.data.samples.samples import Sample
from superpod.errors import UserError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers: [nemo] extra")

CHAT = (
    {"role": "system", "content": "short"},
    {"role": "user", "content": "two and two?"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "and three?"},
    {"role": "assistant", "content": "five"},
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETS = (  # earlier answers are shortened, as Qwen3 does with its thoughts
    "{% for m in messages %}{{ m.role }}:{{ m.content if loop.last or m.role != 'assistant' else '-' }};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture
def tokenizer(tmp_path):
    from superpod.data.samples import chat
    from superpod.data.tokens import tokenizer as training

    training.train(["two and two are four", "and three are five"] * 3, 300, tmp_path / "t")
    return chat.load(str(tmp_path / "t"))


def learnt(encoded, tokenizer):
    """Runs of learnt tokens, decoded."""
    runs, open_ = [], False
    for token, on in zip(encoded.ids, encoded.learnt, strict=True):
        if on:
            runs[-1:] = [runs[-1] + [token]] if open_ else [*runs[-1:], [token]]
        open_ = on
    return [tokenizer.decode(run) for run in runs]


def encode(tokenizer, learn="answers", **sample):
    from superpod.data.samples import chat

    return chat.encode(Sample(3, **sample), tokenizer, learn)


def test_of_a_prompt_the_completion_is_learnt_with_its_end(tokenizer):
    encoded = encode(tokenizer, text="two and two are four", prompt=15)
    assert learnt(encoded, tokenizer) == [" four<|endoftext|>"]
    assert tokenizer.decode(encoded.ids) == "two and two are four<|endoftext|>"


def test_of_text_all_is_learnt(tokenizer):
    assert learnt(encode(tokenizer, text="two and two"), tokenizer) == ["two and two<|endoftext|>"]


def test_of_a_chat_every_answer_is_learnt_by_the_plain_template(tokenizer):
    encoded = encode(tokenizer, messages=CHAT)
    assert learnt(encoded, tokenizer) == [" four<|endoftext|>\n", " five<|endoftext|>\n"]
    assert tokenizer.decode(encoded.ids).startswith("system: short\nuser: two and two?\nassistant: four<|endoftext|>\n")


def test_the_tokenizer_s_own_template_is_taken(tokenizer):
    tokenizer.chat_template = CHATML
    assert learnt(encode(tokenizer, messages=CHAT), tokenizer) == ["four<|im_end|>\n", "five<|im_end|>\n"]


QWEN = (  # a system message of its own where the chat has none, as Qwen 2.5 does
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}" + CHATML
)
GREETING = ({"role": "assistant", "content": "four"}, *CHAT[1:])


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (None, [" four<|endoftext|>\n", " four<|endoftext|>\n", " five<|endoftext|>\n"]),
        (CHATML, ["four<|im_end|>\n", "four<|im_end|>\n", "five<|im_end|>\n"]),
        (QWEN, ["four<|im_end|>\n", "four<|im_end|>\n", "five<|im_end|>\n"]),
    ],
)
def test_a_chat_that_the_assistant_begins_is_learnt_without_its_header(template, answers, tokenizer):
    tokenizer.chat_template = template or tokenizer.chat_template
    assert learnt(encode(tokenizer, messages=GREETING), tokenizer) == answers
    alone = encode(tokenizer, "last", messages=GREETING[:1])
    assert learnt(alone, tokenizer) == answers[:1]
    assert not alone.learnt[0]


def test_a_first_answer_that_does_not_begin_like_the_others_is_refused(tokenizer):
    tokenizer.chat_template = CHATML.replace("{{ m.role }}", "{{ 'bot' if loop.first else m.role }}")
    with pytest.raises(UserError, match="does not begin answers with its generation prompt, message 0"):
        encode(tokenizer, messages=GREETING)


def test_where_a_template_rewrites_earlier_turns_only_the_last_answer_can_be_learnt(tokenizer):
    tokenizer.chat_template = FORGETS
    with pytest.raises(UserError, match=r"line 3: .* writes message 2 differently .*four;' becomes '.*:-;") as refused:
        encode(tokenizer, messages=CHAT)
    assert "--learn last" in refused.value.hint
    assert learnt(encode(tokenizer, "last", messages=CHAT), tokenizer) == ["five;"]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "line 3: the chat template refuses it: roles must alternate"),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}",
            "does not beg",
        ),
    ],
)
def test_a_template_that_cannot_be_learnt_from_is_refused(template, says, tokenizer):
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=says):
        encode(tokenizer, messages=CHAT)


MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<a>{% generation %}{{ m.content }}<|endoftext|>"
    "{% endgeneration %}\n{% else %}<{{ m.role }}>{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %};"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CALL = (
    {"role": "user", "content": "sum?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "four"},
)


@pytest.mark.parametrize("template", [MARKED, CHATML])
def test_the_learnt_tokens_are_those_that_transformers_masks(template, tokenizer):
    """With marks, its own mask; without, what the last answers add, as it renders and encodes both."""
    tokenizer.chat_template = template
    encoded = encode(tokenizer, messages=CHAT)
    if template == MARKED:
        theirs = tokenizer.apply_chat_template(list(CHAT), return_dict=True, return_assistant_tokens_mask=True)
        assert encoded.ids == theirs["input_ids"]
        assert list(map(int, encoded.learnt)) == theirs["assistant_masks"]
        assert sum(encoded.learnt) > 4
        return
    assert encoded.ids == tokenizer.apply_chat_template(list(CHAT))
    for at in (2, 4):
        begin = len(tokenizer.apply_chat_template(list(CHAT[:at]), add_generation_prompt=True))
        end = len(tokenizer.apply_chat_template(list(CHAT[: at + 1])))
        assert encoded.learnt[begin:end] == [True] * (end - begin)
        assert not encoded.learnt[begin - 1]
    assert learnt(encoded, tokenizer) == ["four<|im_end|>\n", "five<|im_end|>\n"]


@pytest.mark.parametrize("template", [MARKED, CHATML])
def test_an_answer_of_weight_0_and_with_last_all_but_the_last_are_not_learnt(template, tokenizer):
    tokenizer.chat_template = template
    end = "<|endoftext|>" if template == MARKED else "<|im_end|>\n"
    assert learnt(encode(tokenizer, messages=CHAT, muted=(2,)), tokenizer) == [f"five{end}"]
    assert learnt(encode(tokenizer, messages=CHAT, muted=(4,)), tokenizer) == [f"four{end}"]
    assert learnt(encode(tokenizer, "last", messages=CHAT), tokenizer) == [f"five{end}"]


def test_calls_and_tools_are_learnt_by_a_template_that_writes_them(tokenizer):
    tokenizer.chat_template = TOOLS
    tools = ({"type": "function", "function": {"name": "add"}},)
    encoded = encode(tokenizer, messages=CALL, tools=tools)
    assert learnt(encoded, tokenizer) == ['add({"a": 2});', "four;"]
    assert tokenizer.decode(encoded.ids).startswith('[{"type": "function"')


@pytest.mark.parametrize(
    ("template", "sample", "says"),
    [
        (CHATML, {"messages": CALL}, "leaves out the tool_calls of message 1"),
        (CHATML, {"messages": CHAT, "tools": ({"name": "f"},)}, "leaves out the tools"),
        (MARKED.replace("{% if m.role == 'assistant' %}", "{% if loop.last %}"), {"messages": CHAT, "muted": (2,)},
         "marks 1 parts as the assistant's, and the chat has 2"),
        ("{% generation %}{% endgeneration %}{{ messages[9].content.x }}", {"messages": CHAT}, "template refuses it"),
        ("{{ 1 / 0 }}{{ messages }}", {"messages": CHAT}, "refuses it: division by zero"),
        ("{% for i in range(9999999999) %}{{ messages }}{% endfor %}", {"messages": CHAT}, "refuses it: Range too big"),
        ("{{ messages.__class__.__mro__ }}", {"messages": CHAT}, "refuses it: access to attribute '__class__'"),
        (CHATML, {"messages": ({"role": "assistant", "content": "a", "name": "\ud800"},)}, None),
        ("{{ messages[0].name }}", {"messages": ({"role": "assistant", "content": "a", "name": "\ud800"},)}, "half a "),
    ],
    ids=range(9),
)  # fmt: skip
def test_what_a_template_cannot_write_is_named(template, sample, says, tokenizer):
    tokenizer.chat_template = template
    if says is None:
        assert any(encode(tokenizer, **sample).learnt)
        return
    with pytest.raises(UserError, match=f"line 3: .*{says}"):
        encode(tokenizer, **sample)


class Letters:
    """A tokenizer of one id a character, with a token that begins a text where `begins`."""

    bos_token_id, eos_token_id, is_fast, chat_template = 1, 2, True, ""

    def __init__(self, begins=True, eos=2, size=300):
        self.begins, self.eos_token_id, self.size = begins, eos, size

    def __len__(self):
        return self.size

    def __call__(self, text, add_special_tokens=True, **_):
        ids = [ord(character) for character in text]
        begin = [1] * (self.begins and add_special_tokens)
        offsets = [(at, at + 1) for at in range(len(text))]
        return SimpleNamespace(data={"input_ids": [*begin, *ids], "offset_mapping": offsets})


@pytest.mark.parametrize("begins", [True, False])
def test_a_text_begins_as_the_tokenizer_begins_it_and_does_not_learn_that(begins):
    encoded = encode(Letters(begins), text="ab", prompt=1)
    assert list(encoded.ids) == [1] * begins + [97, 98, 2]
    assert list(encoded.learnt) == [False] * begins + [False, True, True]
    assert encoded.line == 3


def test_another_first_token_is_not_the_one_that_begins_a_text():
    tokenizer: Any = Letters()
    tokenizer.bos_token_id = None
    assert list(encode(tokenizer, text="a").ids) == [97, 2]
    tokenizer.bos_token_id = 9
    assert list(encode(tokenizer, text="a").ids) == [97, 2]


@pytest.mark.parametrize(("eos", "size"), [(None, 300), (2, 0)])
def test_a_tokenizer_that_cannot_end_a_text_is_refused(eos, size):
    from superpod.data.samples import chat

    tokenizer: Any = Letters(eos=eos, size=size)
    with pytest.raises(UserError, match="the tokenizer of X has no end-of-sequence token"):
        chat.ready(tokenizer, "X")


def test_a_template_of_its_own_is_kept():
    from superpod.data.samples import chat

    tokenizer: Any = Letters()
    assert chat.ready(tokenizer, "X").chat_template == chat.PLAIN
    tokenizer.chat_template = "own"
    assert chat.ready(tokenizer, "X").chat_template == "own"


@pytest.mark.parametrize(
    ("spans", "learnt"),
    [
        ([(1, 3)], [False, True, True, False]),
        ([(0, 1), (3, 4)], [True, False, False, True]),
        ([(2, 2)], [False] * 4),
        ([], [False] * 4),
    ],
)
def test_a_token_is_learnt_where_it_overlaps_a_span(spans, learnt):
    from superpod.data.samples import chat

    tokenizer: Any = Letters()
    assert chat._ids("abcd", spans, tokenizer) == ([97, 98, 99, 100], learnt)


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        ("abc", "abd", "'abc' becomes 'abd' (character 2)"),
        ("ab", "abc", "'ab' becomes 'abc' (character 2)"),
        ("x" * 30 + "a", "x" * 30 + "b", f"{'x' * 20 + 'a'!r} becomes {'x' * 20 + 'b'!r} (character 30)"),
        ("a" + "x" * 30, "b" + "x" * 30, f"{'a' + 'x' * 19!r} becomes {'b' + 'x' * 19!r} (character 0)"),
    ],
)
def test_where_two_texts_part(one, other, says):
    from superpod.data.samples import chat

    assert chat._difference(one, other) == says
