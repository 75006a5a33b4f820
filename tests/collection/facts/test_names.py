"""Test the translation of names in any spelling and of Hugging Face ids."""

import random
import re
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superpod.collection import registry
from superpod.collection.facts import names
from superpod.errors import UserError
from superpod.planner import models as planned

IDS = sorted((one, model) for model, ids in names.load_hub_ids().items() for one in ids)
WITH_NUMBERS = [(one, model) for one, model in IDS if re.search(r"/.*\d", one)]
OURS = sorted(registry.models())


def meaning(text: str) -> str:
    """Return the translated name, or "" if the text is unknown or refused."""
    try:
        name = names.translate(text)
    except UserError:
        return ""
    return name if name != text or name in names._list_model_names() else ""


def test_each_id_belongs_to_one_model():
    assert set(registry.models()) - set(names.load_hub_ids()) == set()
    every = [one for one, _ in IDS]
    assert len({one.lower() for one in every}) == len(every)
    alike = {"llama_embedding_1b", "llama_embedding_3b", "llama_reranker_1b"}  # they start from another model's weights
    for model in registry.models().values():
        if model.hf and model.name not in alike:
            assert names.load_hub_ids()[model.name][0] == model.hf
    for model in names.load_hub_ids():
        assert planned.find(model) or model in registry.models()


@pytest.mark.parametrize(("one", "model"), IDS)
def test_id_with_and_without_organization_is_its_model(one, model):
    assert names.translate(one) == model
    assert names.translate(one.lower()) == model
    assert names.translate(one.partition("/")[2]) == model
    assert names.translate(f"https://huggingface.co/{one}") == model


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llama3-8b", "llama3_8b"),
        ("LLAMA3_8B", "llama3_8b"),
        ("llama-3.1-8b-instruct", "llama31_8b"),
        ("Llama 3.1 8B", "llama31_8b"),
        ("llama3_1_8b", "llama31_8b"),
        ("qwen2.5-0.5b", "qwen25_500m"),
        ("gemma-2b", "gemma_2b"),
        ("gemma-2-2b", "gemma2_2b"),
        ("mamba2-1.3b", "mamba2_1_3b"),
        ("phi-3-mini-4k-instruct", "phi3_mini"),
        ("llama3-8b-pretrain-h100-bf16", "llama3_8b_pretrain_h100_bf16"),
        ("Llama-3.1-8B-sft-H100-bf16", "llama31_8b_sft_h100_bf16"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama33_70b"),
        # as they are: ours, a path, a shape by hand, NeMo's own, or nothing that is known
        *((text, text) for text in ("llama3_8b", "llama3_8b_pretrain_h100_fp16", "nemo:llama3_8b", "runs/mine")),
        *((text, text) for text in ("layers=2,hidden=64", "recipe.py", "config.json", "hello", "", "tiny_llama3_lora")),
        # other models, whose names are like ours
        *((text, text) for text in ("llama-3-18b", "mistral-7b-v0.1", "Qwen3-4B-Instruct-2507", "gemma-22b")),
        *((text, text) for text in ("qwen25b", "llama3.18b", "Qwen2.5-Math-7B", "DeepSeek-R1-Distill-Qwen-7B")),
        *((text, text) for text in ("CodeLlama-7b-hf", "Phi-3-mini-128k-instruct", "llama31_8b_x")),
    ],
)
def test_spellings(text, name):
    assert names.translate(text) == name


@pytest.mark.parametrize(
    ("text", "candidates"),
    [("llama-8b", ["llama3_8b", "llama31_8b"]), ("llama3", ["llama3_8b", "llama3_70b"]), ("qwen-7b", ["qwen2_7b"])],
)
def test_refuses_ambiguous_name(text, candidates):
    with pytest.raises(UserError, match="is ambiguous") as refused:
        names.translate(text)
    assert all(name in str(refused.value) for name in candidates)


def test_refuses_unknown_id_with_suggestions():
    with pytest.raises(UserError, match="Qwen/Qwen4-8B is not a known model") as refused:
        names.translate("Qwen/Qwen4-8B")
    assert "Qwen/Qwen3-8B" in refused.value.hint
    assert "recipes plan" in refused.value.hint


def test_existing_folder_takes_precedence(tmp_path, monkeypatch):
    (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    (tmp_path / "llama3-8b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert names.translate("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    assert names.translate("llama3-8b") == "llama3-8b"


def test_python_api_accepts_ids():
    assert registry.find("llama3-8b-pretrain-h100-bf16").name == "llama3_8b_pretrain_h100_bf16"
    with pytest.raises(UserError, match="llama31_8b is a model, not a recipe"):
        registry.find("meta-llama/Llama-3.1-8B")


# -- nothing is read as another --------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(IDS), st.data())
def test_id_ignores_case_and_separators(case, data):
    one, model = case
    name = one.partition("/")[2]
    flipped = "".join(data.draw(st.sampled_from([c.lower(), c.upper()])) for c in name)
    separated = re.sub("[-_]", lambda _: data.draw(st.sampled_from("-_ ")), flipped)
    assert names.translate(separated) == model


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(WITH_NUMBERS), st.randoms(use_true_random=False))
def test_other_number_is_another_model(case, rand: random.Random):
    one, model = case
    name = one.partition("/")[2]
    digits = [i for i, c in enumerate(name) if c.isdigit()]
    place = rand.choice(digits)
    other = name[:place] + rand.choice([d for d in string.digits if d != name[place]]) + name[place + 1 :]
    read = meaning(other)
    assert read != model or names.split_name(other) in {
        names.split_name(i.partition("/")[2]) for i, m in IDS if m == model
    }
    if read:  # then it is the other model's own name or id
        own = {names.split_name(i.rpartition("/")[2]) for i, m in IDS if m == read} | {names.split_name(read)}
        assert any(
            names.split_name(other) in names._list_spellings(i.rpartition("/")[2]) for i, m in IDS if m == read
        ) or (names.split_name(other) in own)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(OURS), st.sampled_from(["v2", "Math", "Coder", "VL", "2507", "1M", "Distill", "R1", "MoE", "x"]))
def test_additional_word_is_another_model(name, word):
    assert meaning(f"{name}-{word}".replace("_", "-")) != name


def squeezed(text: str) -> str:
    """Normalize a name: lower-case letters and digits only, and 500m for 0.5b."""
    plain = re.sub(r"0[.p](\d)b", r"\g<1>00m", text.lower())
    return re.sub("^(meta|nvidia)", "", re.sub("[^a-z0-9]", "", plain))


def same_letters(text: str, name: str) -> bool:
    """Whether `text` is `name` or an id of its model after normalization."""
    recipe = registry.recipes().get(name)
    model, rest = (recipe.model.name, squeezed(recipe.suffix)) if recipe else (name, "")
    ids = names.load_hub_ids().get(model, [])
    own = {model, *ids, *(one.rpartition("/")[2] for one in ids)}
    return squeezed(text) in {squeezed(one) + rest for one in own}


def test_result_has_the_same_letters_as_the_input():
    """For random mixtures of words of names and ids, no part is left out, added or moved."""
    rand = random.Random(0)
    words = sorted(
        {word for one, _ in IDS for word in re.findall(r"[a-z]+|\d+(?:\.\d+)?b?", one.partition("/")[2].lower())}
    )
    read = 0
    for _ in range(3000):
        name = re.split("[-_]", rand.choice(IDS)[0].partition("/")[2])
        for _ in range(rand.randrange(3)):
            at = rand.randrange(len(name) + 1)
            name[at : at + rand.randrange(2)] = rand.choice([[], [rand.choice(words)]])
        text = rand.choice("-_ ").join(name)
        if (result := meaning(text)) and result != text:
            read += 1
            assert same_letters(text, result), (text, result)
    assert read > 1000


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_arbitrary_text_never_raises_other_errors(text):
    refused = None
    try:
        name = names.translate(text)
    except UserError as problem:
        refused = problem
    assert refused.hint if refused else name == text or same_letters(text, name)


@pytest.mark.parametrize("text", ["llama3_8b*", "\u200bllama3_8b", "llama3_8b?", "llама3_8b llama3_8b"])
def test_invalid_characters_are_not_ignored(text):
    assert names.translate(text) == names.translate_word(text) == text
