import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from superpod.data.samples import packing
from superpod.data.samples.chat import Encoded
from superpod.errors import UserError


def sample(line, prompt, answer):
    """Return a sample whose ids count up from 100 x line."""
    ids = [100 * line + i for i in range(prompt + answer)]
    return Encoded(line, ids, [i >= prompt for i in range(prompt + answer)])


def test_refuses_long_samples():
    with pytest.raises(
        UserError, match="2 of 3 samples have more than 4 tokens; the longest, line 2, has 9"
    ) as refused:
        packing.limit_lengths([sample(1, 2, 2), sample(2, 4, 5), sample(3, 3, 3)], 4)
    assert "--long cut" in refused.value.hint


def test_truncates_or_drops_long_samples():
    samples = [sample(1, 2, 2), sample(2, 3, 5), sample(3, 6, 3)]
    kept, counts = packing.limit_lengths(samples, 4, "cut")
    # Of the third sample only the prompt was left.
    assert [sample.ids for sample in kept] == [samples[0].ids, samples[1].ids[:5]]
    assert (counts.samples, counts.cut, counts.dropped, counts.longest) == (2, 1, 1, 9)
    assert (counts.tokens, counts.learnt) == (3 + 4, 2 + 2)
    kept, counts = packing.limit_lengths(samples, 4, "drop")
    assert (kept, counts.cut, counts.dropped) == (samples[:1], 0, 2)


def test_keeps_sample_of_exact_length():
    assert packing.limit_lengths([sample(1, 1, 4)], 4)[1].cut == 0  # four tokens are read, the fifth is predicted


def test_refuses_if_no_sample_remains():
    with pytest.raises(UserError, match="no sample remains: all 1 are longer than 2 tokens"):
        packing.limit_lengths([sample(1, 4, 4)], 2, "cut")


@given(st.lists(st.integers(2, 40), min_size=1, max_size=60), st.sampled_from([1, 4, 8]), st.integers(0, 3))
def test_pack_keeps_every_sample_once(lengths, multiple, seed):
    samples = [sample(line, 1, length - 1) for line, length in enumerate(lengths)]
    bins = packing.pack(samples, 40, multiple, seed)
    assert sorted(sample.line for packed in bins for sample in packed) == list(range(len(lengths)))
    taken = [sum(-(-(len(sample.ids) - 1) // multiple) * multiple for sample in packed) for packed in bins]
    assert all(0 < tokens <= 40 for tokens in taken)
    assert sum(tokens <= 20 for tokens in taken) <= 1  # two such bins would be one


def test_packed_rows_in_nemos_format(tmp_path):
    samples = [sample(1, 2, 3), sample(2, 1, 2)]
    packing.write_bins([samples], tmp_path / "train.npy", multiple=4, filler=9, batch=4)
    rows = np.load(tmp_path / "train.npy", allow_pickle=True)
    row = rows[0]
    edges = [*row["seq_start_id"], len(row["input_ids"])]
    assert edges == [0, 5, 10]
    for number, (begin, end) in enumerate(pairwise(edges)):  # as its collate_fn does
        read, predicted = row["input_ids"][begin : end - 1], row["input_ids"][begin + 1 : end]
        mask = row["loss_mask"][begin : end - 1]
        assert len(read) == 4
        learnt = [token for token, on in zip(predicted, mask, strict=True) if on]
        assert learnt == [token for token, on in zip(samples[number].ids, samples[number].loss_mask, strict=True) if on]
    assert row["input_ids"][5 + 3 :].tolist() == [9, 9]
    assert len(rows) == 4
    assert all(sum(blank["loss_mask"]) == 0 and all(blank["input_ids"] == row["input_ids"]) for blank in rows[1:])
    assert [path.name for path in tmp_path.iterdir()] == ["train.npy"]


def test_metadata_in_nemos_format(tmp_path):
    packing.write_metadata([[[sample(1, 1, 3), sample(2, 1, 1)], [sample(3, 1, 5)]]], tmp_path / "m.json")
    [facts] = json.loads((tmp_path / "m.json").read_text())
    assert facts == {"max_samples_per_bin": 2, "dataset_max_seqlen": 6, "min_packed_seqlen": 4}
