"""Which tokens a model learns, seen by decoding them. Needs transformers, as the [nemo] extra has it."""

import importlib.util

import pytest

from superpod.errors import UserError
from superpod.recipes.data.samples import Sample

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
    from superpod.recipes.data import chat
    from superpod.recipes.data import tokenizer as training

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


def encode(tokenizer, **sample):
    from superpod.recipes.data import chat

    return chat.encode(Sample(3, **sample), tokenizer)


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


def test_where_a_template_rewrites_earlier_turns_the_last_answer_is_learnt(tokenizer):
    tokenizer.chat_template = FORGETS
    assert learnt(encode(tokenizer, messages=CHAT), tokenizer) == ["five;"]


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
