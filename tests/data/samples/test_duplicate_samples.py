"""Test that no sample is both trained and validated on, whatever its file name and format."""

import gzip
import importlib.util
import json
import os
import shutil
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from superpod.data.readers import sources
from superpod.data.samples import chat, duplicate_samples
from superpod.data.samples.samples import ReadOptions
from superpod.data.tokens import tokenizer
from superpod.errors import UserError
from superpod.weights.finetuning import packed_data
from superpod.weights.finetuning.packed_data import DataOptions

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers: [nemo] extra")

CHATS = [[("user", f"question {at}"), ("assistant", f"answer {at * at}")] for at in range(60)]


def openai(chats) -> list[dict[str, Any]]:
    return [{"messages": [{"role": role, "content": text} for role, text in turns]} for turns in chats]


def share_gpt(chats):
    names = {"user": "human", "assistant": "gpt"}
    return [{"conversations": [{"from": names[role], "value": text} for role, text in turns]} for turns in chats]


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tokenizer"
    tokenizer.train(["question answer", "user assistant"] * 3, 300, folder)
    return chat.load_tokenizer(str(folder))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", openai(CHATS[:40]))
    write(tmp_path / "b.jsonl", openai(CHATS[40:]))
    return tmp_path


def packed(texts, model, out, **more):
    """Return the counts, and the samples of both parts by token ids."""
    from superpod.weights.finetuning.data_and_weights import TRAIN, VALIDATION, PackingSizes

    names, weights = sources.parse_data_options(texts)
    options = DataOptions(names, weights=weights, **more)
    packed_data.check_data(options)
    sizes = PackingSizes(longest=128, size=256, batch=1, multiple=1, aligned=16)
    counts = packed_data.pack(options, sizes, model, out)
    parts = []
    for name in (TRAIN, VALIDATION):
        rows = [row for row in np.load(out / name, allow_pickle=True) if row["loss_mask"].any()]
        spans = [(row, pairwise([*row["seq_start_id"], len(row["input_ids"])])) for row in rows]
        parts.append(Counter(tuple(row["input_ids"][begin:end].tolist()) for row, span in spans for begin, end in span))
    return counts, parts[0], parts[1]


def link(folder):
    os.symlink("a.jsonl", folder / "c.jsonl")


def hard_link(folder):
    os.link(folder / "a.jsonl", folder / "c.jsonl")


def copy(folder):
    shutil.copyfile(folder / "a.jsonl", folder / "c.jsonl")


def compressed(folder):
    (folder / "c.jsonl.gz").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes()))


def other_format(folder):
    write(folder / "c.jsonl", share_gpt(CHATS[:40]))


def array(folder):
    (folder / "c.json").write_text(json.dumps(openai(CHATS[:40])))


def parquet(folder):
    arrow, files = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    files.write_table(arrow.Table.from_pylist(openai(CHATS[:40])), folder / "c.parquet")


SECOND = [link, hard_link, copy, compressed, other_format, array, parquet]


@pytest.mark.parametrize("again", SECOND)
def test_duplicate_file_by_name_and_by_glob(again, folder, model):
    again(folder)
    second = str(next(folder.glob("c.*")))
    with pytest.raises(UserError, match=r"every sample of .*c\.\S+ is also in \S*a\.jsonl$"):
        packed(["a.jsonl", second], model, folder / "out")
    with pytest.raises(UserError, match=r"every sample of .*a\.jsonl is also in --validation-data \S*c\.\S+$"):
        packed(["a.jsonl"], model, folder / "out", validation_data=(second,))
    counts, training, held = packed(["[abc].*"], model, folder / "out", share=0.2)
    assert not training & held
    assert set((training + held).values()) == {1}
    assert len(training + held) == 60
    assert "  removed 40 duplicate samples: 40 repeated in the same source" in packed_data.format_counts(counts)


def test_file_given_twice_counts_once(folder, model):
    with pytest.raises(UserError, match=r"every sample of .*a.jsonl is also in .*\*.jsonl"):
        packed(["*.jsonl", "a.jsonl"], model, folder / "out")
    counts, training, held = packed(["a.jsonl", "*.jsonl"], model, folder / "out", share=0.2)
    assert not training & held
    assert len(training + held) == 60
    assert f"  removed 40 duplicate samples: 40 also in {folder}/a.jsonl" in packed_data.format_counts(counts)


def test_duplicate_rows_are_not_in_both_parts(folder, model):
    write(folder / "c.jsonl", openai(CHATS * 3 + CHATS[:7]))
    counts, training, held = packed(["c.jsonl"], model, folder / "out", share=0.3)
    assert (sum(training.values()), sum(held.values())) == (42, 18)
    assert not training & held
    assert counts["read"][0]["duplicates"] == {str(folder / "c.jsonl"): 127}


def test_validation_samples_are_not_trained_on(folder, model):
    write(folder / "v.jsonl", share_gpt(CHATS[30:50]))
    counts, training, held = packed(["a.jsonl"], model, folder / "out", validation_data=(str(folder / "v.jsonl"),))
    assert (len(training), len(held)) == (30, 20)
    assert not training & held
    assert (
        f"  removed 10 duplicate samples: 10 also in --validation-data {folder}/v.jsonl"
        in packed_data.format_counts(counts)
    )


def test_compares_validation_split_of_a_dataset(folder, model):
    (folder / "set").mkdir()
    write(folder / "set" / "train.jsonl", openai(CHATS[:40]))
    write(folder / "set" / "validation.jsonl", openai(CHATS[35:]))
    counts, training, held = packed(["set"], model, folder / "out")
    assert (len(training), len(held)) == (35, 25)
    assert counts["read"][0]["duplicates"] == {f"{folder}/set (validation)": 5}


def test_samples_equal_after_truncation_are_duplicates(folder, model):
    write(folder / "c.jsonl", [{"text": "question " * 200 + end} for end in ("a", "b")] + [{"text": "answer"}])
    counts, training, held = packed(["c.jsonl"], model, folder / "out", share=0.5, long="cut")
    assert len(training + held) == 2
    assert counts["read"][0]["duplicates"] == {str(folder / "c.jsonl"): 1}


def test_weights_apply_to_distinct_samples(folder, model):
    write(folder / "c.jsonl", openai(CHATS[:45]))
    counts, _, _ = packed(["a.jsonl:0.5", "c.jsonl:0.5"], model, folder / "out", share=0.1)
    assert [part["samples"] for part in counts["mix"]] == [36, 5]


def test_duplicates_with_other_masks_and_system_prompt(folder, model):
    rows = openai(CHATS[:40])
    for row in rows:
        row["messages"].insert(0, {"role": "system", "content": "be brief"})
    write(folder / "c.jsonl", rows)
    with pytest.raises(UserError, match="every sample of"):
        packed(["a.jsonl", "c.jsonl"], model, folder / "out", reading=ReadOptions(system="be brief"))
    for row in rows:
        row["messages"] = [*row["messages"][1:], {"role": "assistant", "content": "so", "weight": 0}]
    write(folder / "c.jsonl", rows)
    for row in rows:
        del row["messages"][-1]["weight"]
    write(folder / "d.jsonl", rows)
    with pytest.raises(UserError, match="every sample of"):
        packed(["c.jsonl", "d.jsonl"], model, folder / "out")


def test_similar_samples_are_not_duplicates():
    distinct = duplicate_samples.DistinctSamples()
    distinct.start("a")
    assert all(distinct.is_new(str(at).encode()) for at in range(1000))
    assert distinct.count_repeats() == {}
