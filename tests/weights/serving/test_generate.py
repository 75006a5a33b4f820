"""Perplexity and generation on a model whose every probability is known."""

import json
import math
from types import SimpleNamespace

import pytest

from superpod.errors import UserError
from superpod.weights.serving import generate
from superpod.weights.transfer import load

torch = pytest.importorskip("torch", reason="torch: [nemo] extra")
VOCABULARY, PADDED = 5, 8
END = 4


class Counting(torch.nn.Module):
    """The likeliest token is the next number, by a factor e^2; the padding rows would win if they were read."""

    def forward(self, tokens, positions, mask, labels=None):
        assert mask is None
        assert positions.tolist() == [list(range(tokens.shape[1]))]
        logits = torch.zeros(*tokens.shape, PADDED)
        logits[..., VOCABULARY:] = 9.0
        logits.scatter_(-1, ((tokens + 1) % VOCABULARY)[..., None], 2.0)
        if labels is None:
            return logits
        return torch.nn.functional.cross_entropy(logits[0, :, :VOCABULARY], labels[0], reduction="none")[None]


class Digits:
    """Characters 0 to 3 are ids; 4 ends a text."""

    eos_token_id, bos_token_id, is_fast, chat_template = END, None, True, "x"

    def __len__(self):
        return VOCABULARY

    def __init__(self):
        self.given = []

    def __call__(self, text, add_special_tokens=True, **_):
        self.given.append((text, add_special_tokens))
        ids = [int(character) if character.isdecimal() else 0 for character in text]
        return SimpleNamespace(data={"input_ids": ids, "offset_mapping": [(at, at + 1) for at in range(len(text))]})

    def decode(self, ids, skip_special_tokens):
        return "".join(str(i) for i in ids if i != END or not skip_special_tokens)

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize
        return "0" + messages[0]["content"] + "2" * add_generation_prompt


@pytest.fixture(autouse=True)
def loaded(monkeypatch):
    model = Counting()
    model.tokenizer = SimpleNamespace(tokenizer=Digits())
    seen = []
    monkeypatch.setattr(load, "load_model", lambda folder, dtype, gpu: seen.append((str(folder), dtype, gpu)) or model)
    yield model
    assert all(entry == ("ckpt", torch.float32, False) for entry in seen)


LIKELY = math.log(math.exp(2) + 4) - 2
UNLIKELY = math.log(math.exp(2) + 4)


def test_a_token_is_judged_by_those_before_it():
    assert generate.compute_token_losses(Counting(), [0, 1, 3]) == pytest.approx([LIKELY, UNLIKELY])


def test_only_what_is_learnt_counts_each_token_alike(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "02", "completion": "3"}, {"prompt": "0", "completion": "3210"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = generate.perplexity("ckpt", str(file))
    # 3 after 2 and the end after 3 are likely; then 3, 2, 1, 0 and the end are not
    loss = (2 * LIKELY + 5 * UNLIKELY) / 7
    assert out == {"loss": pytest.approx(loss), "perplexity": pytest.approx(math.exp(loss)), "tokens": 7, "samples": 2}


def test_the_likeliest_tokens_go_on_until_the_end():
    assert generate.generate("ckpt", ["0", "12"]) == ["123", "3"]
    assert generate.generate("ckpt", ["0"], tokens=2) == ["12"]


def test_a_chat_begins_as_its_template_says(loaded):
    assert generate.generate("ckpt", ["1"], chat=True) == ["3"]  # 0 1 2, and goes on with 3
    assert loaded.tokenizer.tokenizer.given == [("012", False)]  # the template has written the special tokens


def test_a_temperature_draws_by_its_seed():
    def drawn(seed, temperature):
        return generate.generate("ckpt", ["0"] * 30, tokens=1, temperature=temperature, seed=seed)

    assert drawn(1, 1.0) == drawn(1, 1.0) != drawn(2, 1.0)
    assert 10 < drawn(1, 1.0).count("1") < 28  # e^2 / (e^2 + 4) of 30 is 19
    assert drawn(1, 0.05) == ["1"] * 30
    assert drawn(1, 50.0).count("1") < 15


@pytest.mark.parametrize("tokenizer", [SimpleNamespace(), SimpleNamespace(tokenizer=SimpleNamespace(is_fast=False))])
def test_a_checkpoint_without_a_tokenizer_is_refused(loaded, tokenizer):
    loaded.tokenizer = tokenizer
    with pytest.raises(UserError, match="ckpt has no tokenizer"):
        generate.generate("ckpt", ["0"])
