"""Test preparing fine-tuning data: weights, validation, bad lines, user templates."""

import importlib.util
import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from superpod.data.samples.samples import SKIPPED_FILE, ReadOptions
from superpod.errors import UserError
from superpod.weights.finetuning import packed_data
from superpod.weights.finetuning.packed_data import DataOptions

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers: [nemo] extra")

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }}{{ eos_token }}{% endfor %}" + (
    "{% if add_generation_prompt %}assistant {% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from superpod.data.tokens import tokenizer

    folder = tmp_path_factory.mktemp("data")
    tokenizer.train(["left right", "centre"] * 3, 300, folder / "model")
    for name, count in (("left", 40), ("right", 10), ("centre", 5)):
        rows = [json.dumps({"question": f"{name} {at}", "answer": f"{name}"}) for at in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    return folder


@pytest.fixture
def sizes():
    from superpod.weights.finetuning.data_and_weights import PackingSizes

    return PackingSizes(longest=64, size=128, batch=2, multiple=1, aligned=16)


def packed(options, sizes, folder, out):
    """Return the counts, and the decoded samples for training and validation."""
    from superpod.data.samples import chat
    from superpod.weights.finetuning.data_and_weights import TRAIN, VALIDATION

    packed_data.check_data(options)
    kept = packed_data.prepare_tokenizer_folder(options, folder / "model", out)
    tokenizer = chat.load_tokenizer(str(kept))
    counts = packed_data.pack(options, sizes, tokenizer, out)
    texts = []
    for name in (TRAIN, VALIDATION):
        rows = [row for row in np.load(out / name, allow_pickle=True) if row["loss_mask"].any()]
        edges = [[*row["seq_start_id"], len(row["input_ids"])] for row in rows]
        texts.append([
            [tokenizer.decode(row["input_ids"][begin:end]) for begin, end in pairwise(edge)]
            for row, edge in zip(rows, edges, strict=True)
        ])  # fmt: skip
    return counts, texts[0], texts[1]


def options_of(folder, *names, **more):
    return DataOptions(tuple(str(folder / f"{name}.jsonl") for name in names), **more)


def test_weights_without_repetition_in_a_sequence(folder, sizes, tmp_path):
    options = options_of(folder, "left", "right", weights=(0.5, 0.5), share=0.1)
    counts, training, validation = packed(options, sizes, folder, tmp_path / "a")
    samples = [text for sequence in training for text in sequence]
    taken = Counter("left" if "left" in text else "right" for text in samples)
    assert taken == {"left": 36, "right": 36}
    assert set(Counter(text for text in samples if "right" in text).values()) == {4}
    assert any(len(sequence) > 1 for sequence in training)
    assert all(len(set(sequence)) == len(sequence) for sequence in training)
    held = [text for sequence in validation for text in sequence]
    assert Counter("left" in text for text in held) == {True: 4, False: 1}
    assert not set(held) & set(samples)
    lines = packed_data.format_counts(counts)
    assert [line.partition(",")[0] for line in lines[:2]] == ["left.jsonl: 40 samples", "right.jsonl: 10 samples"]
    assert "left.jsonl: 50.0% of an epoch, 36 samples, each 1.00 times" in lines
    assert "right.jsonl: 50.0% of an epoch, 36 samples, each 4.00 times" in lines
    assert json.loads(json.dumps(counts)) == counts
    assert packed(options, sizes, folder, tmp_path / "b")[1:] == (training, validation)
    assert packed(replace(options, seed=5), sizes, folder, tmp_path / "c")[1] != training


def test_uses_validation_split_of_a_dataset(folder, sizes, tmp_path):
    (tmp_path / "set").mkdir()
    for split, name in (("train", "left"), ("validation", "centre"), ("test", "right")):
        (tmp_path / "set" / f"{split}.jsonl").write_bytes((folder / f"{name}.jsonl").read_bytes())
    options = DataOptions((str(tmp_path / "set"),))
    counts, training, validation = packed(options, sizes, folder, tmp_path / "out")
    assert (counts["training"]["samples"], counts["validation"]["samples"]) == (40, 5)
    words = [[Counter(text.split()[1] for sequence in part for text in sequence)] for part in (training, validation)]
    assert words == [[{"left": 40}], [{"centre": 5}]]
    with pytest.raises(UserError, match="has its own validation split"):
        packed_data.check_data(replace(options, share=0.1))
    with pytest.raises(UserError, match=r"has a validation split, but .*left.jsonl has none"):
        packed_data.check_data(replace(options, data=(*options.data, str(folder / "left.jsonl"))))
    other = replace(options, validation_data=(str(folder / "right.jsonl"),))
    assert packed(other, sizes, folder, tmp_path / "other")[0]["validation"]["samples"] == 10


def test_stores_bad_lines_with_packed_samples(folder, sizes, tmp_path):
    lines = (folder / "left.jsonl").read_text()
    (tmp_path / "a.jsonl").write_text(lines + "\n{}\n" + '{"question": "a", "answer": 3}')
    options = DataOptions((str(tmp_path / "a.jsonl"),), reading=ReadOptions(skip=True))
    counts, _, _ = packed(options, sizes, folder, tmp_path / "out")
    kept = [json.loads(line) for line in (tmp_path / "out" / SKIPPED_FILE).read_text().splitlines()]
    assert [(row["line"], row["text"]) for row in kept] == [(41, "{}"), (42, '{"question": "a", "answer": 3}')]
    printed = "\n".join(packed_data.format_counts(counts))
    assert "skipped 2 bad lines (1 x has the keys none, 1 x answer is a number, not a string), copied to " in printed
    assert str(tmp_path / "out" / SKIPPED_FILE) in printed
    with pytest.raises(UserError, match=r"a.jsonl:41: has the keys none"):
        packed_data.check_data(replace(options, reading=ReadOptions()))


REFUSES = "{% for m in messages %}{% if '7' in m.content %}{{ raise_exception('no sevens') }}{% endif %}{{ m.role }} {{ m.content }}{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"  # noqa: E501


def test_user_template(folder, sizes, tmp_path):
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    options = options_of(folder, "left", template=str(tmp_path / "t.jinja"))
    _, training, _ = packed(options, sizes, folder, tmp_path / "data")
    texts = [text for sequence in training for text in sequence]
    assert len(texts) == 38
    assert all(text.startswith("user left ") for text in texts)
    assert packed_data.find_export_source(tmp_path, folder / "model") == tmp_path / "data" / "tokenizer"
    assert packed_data.find_export_source(tmp_path / "none", folder / "model") == folder / "model"
    (tmp_path / "t.jinja").write_text(REFUSES)
    with pytest.raises(UserError, match=r"left.jsonl:8: the chat template rejects it: no sevens"):
        packed(options, sizes, folder, tmp_path / "refused")
    skipping = replace(options, reading=ReadOptions(skip=True, max_bad_share=0.2))
    counts, _, _ = packed(skipping, sizes, folder, tmp_path / "skipped")
    assert (counts["read"][0]["samples"], counts["read"][0]["skipped"]) == (36, 4)


def test_reports_truncated_and_dropped_samples(folder, sizes, tmp_path):
    long = json.dumps({"question": "left", "answer": "right " * 80})
    (tmp_path / "a.jsonl").write_text((folder / "left.jsonl").read_text() + "\n" + long)
    options = DataOptions((str(tmp_path / "a.jsonl"),))
    with pytest.raises(UserError, match=r"1 of 41 samples have more than 64 tokens; the longest, .*a.jsonl:41, has "):
        packed(options, sizes, folder, tmp_path / "refused")
    for policy, says in (("cut", "1 truncated"), ("drop", "1 dropped; the longest had")):
        counts, _, _ = packed(replace(options, long=policy), sizes, folder, tmp_path / policy)
        assert says in "\n".join(packed_data.format_counts(counts))


@pytest.mark.nemo
@pytest.mark.slow
def test_nemo_reads_arrays_like_lists(folder, sizes, tmp_path, nemo):
    """NeMo packs sequences as lists; arrays give the same batches."""
    from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
    from nemo.collections.llm.gpt.data.core import create_sft_dataset

    from superpod.weights.finetuning.data_and_weights import METADATA, TRAIN

    packed(options_of(folder, "left", "right"), sizes, folder, tmp_path)
    rows = np.load(tmp_path / TRAIN, allow_pickle=True)
    lists = np.empty(len(rows), dtype=object)
    lists[:] = [{name: list(map(int, row[name])) for name in row} for row in rows]
    np.save(tmp_path / "lists.npy", lists, allow_pickle=True)
    tokenizer = AutoTokenizer(str(folder / "model"), use_fast=True)
    batches = []
    for name in (TRAIN, "lists.npy"):
        data = create_sft_dataset(
            tmp_path / name, tokenizer, seq_length=128, pack_metadata_file_path=tmp_path / METADATA, max_num_samples=12
        )
        batches.append([data.collate_fn([data[at]]) for at in range(12)])
    for ours, theirs in zip(*batches, strict=True):
        assert {key: np.asarray(value).tolist() for key, value in ours.items()} == {
            key: np.asarray(value).tolist() for key, value in theirs.items()
        }
        assert ours["loss_mask"].sum() > 0
