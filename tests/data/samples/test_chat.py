"""Test loss masks by decoding the tokens in the loss. Needs transformers."""

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
    return chat.load_tokenizer(str(tmp_path / "t"))


def trained_on(encoded, tokenizer):
    """Decode the runs of tokens in the loss."""
    runs, open_ = [], False
    for token, on in zip(encoded.ids, encoded.loss_mask, strict=True):
        if on:
            runs[-1:] = [runs[-1] + [token]] if open_ else [*runs[-1:], [token]]
        open_ = on
    return [tokenizer.decode(run) for run in runs]


def encode(tokenizer, learn="answers", **sample):
    from superpod.data.samples import chat

    return chat.encode_sample(Sample(3, **sample), tokenizer, learn)


def test_loss_mask_of_a_completion(tokenizer):
    encoded = encode(tokenizer, text="two and two are four", prompt=15)
    assert trained_on(encoded, tokenizer) == [" four<|endoftext|>"]
    assert tokenizer.decode(encoded.ids) == "two and two are four<|endoftext|>"


def test_loss_mask_of_a_text(tokenizer):
    assert trained_on(encode(tokenizer, text="two and two"), tokenizer) == ["two and two<|endoftext|>"]


def test_loss_mask_with_the_plain_template(tokenizer):
    encoded = encode(tokenizer, messages=CHAT)
    assert trained_on(encoded, tokenizer) == [" four<|endoftext|>\n", " five<|endoftext|>\n"]
    assert tokenizer.decode(encoded.ids).startswith("system: short\nuser: two and two?\nassistant: four<|endoftext|>\n")


def test_uses_the_template_of_the_tokenizer(tokenizer):
    tokenizer.chat_template = CHATML
    assert trained_on(encode(tokenizer, messages=CHAT), tokenizer) == ["four<|im_end|>\n", "five<|im_end|>\n"]


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
def test_loss_mask_if_the_assistant_begins(template, answers, tokenizer):
    tokenizer.chat_template = template or tokenizer.chat_template
    assert trained_on(encode(tokenizer, messages=GREETING), tokenizer) == answers
    alone = encode(tokenizer, "last", messages=GREETING[:1])
    assert trained_on(alone, tokenizer) == answers[:1]
    assert not alone.loss_mask[0]


def test_refuses_first_answer_with_other_header(tokenizer):
    tokenizer.chat_template = CHATML.replace("{{ m.role }}", "{{ 'bot' if loop.first else m.role }}")
    with pytest.raises(UserError, match="message 0 differently from its generation prompt"):
        encode(tokenizer, messages=GREETING)


def test_template_that_changes_earlier_turns_needs_last(tokenizer):
    tokenizer.chat_template = FORGETS
    with pytest.raises(UserError, match=r"line 3: .* changes message 2 .*four;' becomes '.*:-;") as refused:
        encode(tokenizer, messages=CHAT)
    assert "--learn last" in refused.value.hint
    assert trained_on(encode(tokenizer, "last", messages=CHAT), tokenizer) == ["five;"]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "line 3: the chat template rejects it: roles must alternate"),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}",
            "differently from its generation prompt",
        ),
    ],
)
def test_refuses_unsuitable_template(template, says, tokenizer):
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
def test_loss_mask_equals_that_of_transformers(template, tokenizer):
    """Compare with the mask of transformers, or without marks with the text that each answer adds."""
    tokenizer.chat_template = template
    encoded = encode(tokenizer, messages=CHAT)
    if template == MARKED:
        theirs = tokenizer.apply_chat_template(list(CHAT), return_dict=True, return_assistant_tokens_mask=True)
        assert encoded.ids == theirs["input_ids"]
        assert list(map(int, encoded.loss_mask)) == theirs["assistant_masks"]
        assert sum(encoded.loss_mask) > 4
        return
    assert encoded.ids == tokenizer.apply_chat_template(list(CHAT))
    for at in (2, 4):
        begin = len(tokenizer.apply_chat_template(list(CHAT[:at]), add_generation_prompt=True))
        end = len(tokenizer.apply_chat_template(list(CHAT[: at + 1])))
        assert encoded.loss_mask[begin:end] == [True] * (end - begin)
        assert not encoded.loss_mask[begin - 1]
    assert trained_on(encoded, tokenizer) == ["four<|im_end|>\n", "five<|im_end|>\n"]


@pytest.mark.parametrize("template", [MARKED, CHATML])
def test_weight_0_and_last_mask_answers(template, tokenizer):
    tokenizer.chat_template = template
    end = "<|endoftext|>" if template == MARKED else "<|im_end|>\n"
    assert trained_on(encode(tokenizer, messages=CHAT, masked=(2,)), tokenizer) == [f"five{end}"]
    assert trained_on(encode(tokenizer, messages=CHAT, masked=(4,)), tokenizer) == [f"four{end}"]
    assert trained_on(encode(tokenizer, "last", messages=CHAT), tokenizer) == [f"five{end}"]


def test_tool_calls_are_in_the_loss(tokenizer):
    tokenizer.chat_template = TOOLS
    tools = ({"type": "function", "function": {"name": "add"}},)
    encoded = encode(tokenizer, messages=CALL, tools=tools)
    assert trained_on(encoded, tokenizer) == ['add({"a": 2});', "four;"]
    assert tokenizer.decode(encoded.ids).startswith('[{"type": "function"')


@pytest.mark.parametrize(
    ("template", "sample", "says"),
    [
        (CHATML, {"messages": CALL}, "ignores the tool_calls of message 1"),
        (CHATML, {"messages": CHAT, "tools": ({"name": "f"},)}, "ignores the tools"),
        (MARKED.replace("{% if m.role == 'assistant' %}", "{% if loop.last %}"), {"messages": CHAT, "masked": (2,)},
         "marks 1 answer, but the chat has 2 assistant messages"),
        ("{% generation %}{% endgeneration %}{{ messages[9].content.x }}", {"messages": CHAT}, "template rejects it"),
        ("{{ 1 / 0 }}{{ messages }}", {"messages": CHAT}, "rejects it: division by zero"),
        ("{% for i in range(9999999999) %}{{ messages }}{% endfor %}", {"messages": CHAT}, "rejects it: Range too big"),
        ("{{ messages.__class__.__mro__ }}", {"messages": CHAT}, "rejects it: access to attribute '__class__'"),
        (CHATML, {"messages": ({"role": "assistant", "content": "a", "name": "\ud800"},)}, None),
        ("{{ messages[0].name }}", {"messages": [{"role": "assistant", "content": "a", "name": "\ud800"}]}, "unpaired"),
    ],
    ids=range(9),
)  # fmt: skip
def test_refuses_what_a_template_does_not_render(template, sample, says, tokenizer):
    tokenizer.chat_template = template
    if says is None:
        assert any(encode(tokenizer, **sample).loss_mask)
        return
    with pytest.raises(UserError, match=f"line 3: .*{says}"):
        encode(tokenizer, **sample)


class Letters:
    """A tokenizer with one id per character, and a BOS token if `begins`."""

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
def test_bos_token_is_masked(begins):
    encoded = encode(Letters(begins), text="ab", prompt=1)
    assert list(encoded.ids) == [1] * begins + [97, 98, 2]
    assert list(encoded.loss_mask) == [False] * begins + [False, True, True]
    assert encoded.line == 3


def test_adds_bos_only_if_the_tokenizer_does():
    tokenizer: Any = Letters()
    tokenizer.bos_token_id = None
    assert list(encode(tokenizer, text="a").ids) == [97, 2]
    tokenizer.bos_token_id = 9
    assert list(encode(tokenizer, text="a").ids) == [97, 2]


@pytest.mark.parametrize(("eos", "size"), [(None, 300), (2, 0)])
def test_refuses_tokenizer_without_eos(eos, size):
    from superpod.data.samples import chat

    tokenizer: Any = Letters(eos=eos, size=size)
    with pytest.raises(UserError, match="the tokenizer of X has no end-of-sequence token"):
        chat.prepare_tokenizer(tokenizer, "X")


def test_keeps_existing_template():
    from superpod.data.samples import chat

    tokenizer: Any = Letters()
    assert chat.prepare_tokenizer(tokenizer, "X").chat_template == chat.DEFAULT_TEMPLATE
    tokenizer.chat_template = "own"
    assert chat.prepare_tokenizer(tokenizer, "X").chat_template == "own"


@pytest.mark.parametrize(
    ("spans", "loss_mask"),
    [
        ([(1, 3)], [False, True, True, False]),
        ([(0, 1), (3, 4)], [True, False, False, True]),
        ([(2, 2)], [False] * 4),
        ([], [False] * 4),
    ],
)
def test_token_overlapping_a_span_is_in_the_loss(spans, loss_mask):
    from superpod.data.samples import chat

    tokenizer: Any = Letters()
    assert chat._tokenize_text("abcd", spans, tokenizer) == ([97, 98, 99, 100], loss_mask)


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        ("abc", "abd", "'abc' becomes 'abd' (character 2)"),
        ("ab", "abc", "'ab' becomes 'abc' (character 2)"),
        ("x" * 30 + "a", "x" * 30 + "b", f"{'x' * 20 + 'a'!r} becomes {'x' * 20 + 'b'!r} (character 30)"),
        ("a" + "x" * 30, "b" + "x" * 30, f"{'a' + 'x' * 19!r} becomes {'b' + 'x' * 19!r} (character 0)"),
    ],
)
def test_difference(one, other, says):
    from superpod.data.samples import chat

    assert chat._describe_difference(one, other) == says
