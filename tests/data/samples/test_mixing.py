"""Test shares of an epoch, repetitions and held-out samples."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superpod.data.samples import mixing
from superpod.errors import UserError


def test_hold_out_partitions_samples_by_seed():
    samples = list(range(40))
    [train], held = mixing.hold_out([samples], 0.1, seed=1)
    assert len(held) == 4
    assert sorted(train + held) == samples
    assert mixing.hold_out([samples], 0.1, seed=1) == ([train], held) != mixing.hold_out([samples], 0.1, seed=2)
    [train], held = mixing.hold_out([samples[:2]], 0.01, seed=1)
    assert [len(train), len(held)] == [1, 1]
    for share, some in ((0.0, samples), (1.0, samples), (0.5, samples[:1])):
        with pytest.raises(UserError):
            mixing.hold_out([some], share, seed=1)


def test_holds_out_share_of_every_source():
    sources = [[("a", at) for at in range(100)], [("b", at) for at in range(20)], [("c", 0)]]
    training, held = mixing.hold_out(sources, 0.1, seed=3)
    assert Counter(name for name, _ in held) == {"a": 10, "b": 2}
    assert [len(part) for part in training] == [90, 18, 1]


def test_parts_follow_weights():
    mix = mixing.compute_epoch([700, 100], [0.7, 0.3])
    assert [(part.taken, part.share) for part in mix] == [(700, 0.7), (300, 0.3)]
    sources = [[("a", at) for at in range(700)], [("b", at) for at in range(100)]]
    made = mixing.split_into_rounds(sources, mix, seed=1)
    assert [len(part) for part in made] == [800, 100, 100]
    assert [part.taken for part in mixing.compute_epoch([700, 100], [])] == [700, 100]


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0.05, 1)), min_size=1, max_size=4), st.integers(0, 3))
def test_rounds_have_no_repeated_sample(given_sources, seed):
    sources = [[(number, at) for at in range(count)] for number, (count, _) in enumerate(given_sources)]
    mix = mixing.compute_epoch([len(source) for source in sources], [weight for _, weight in given_sources])
    made = mixing.split_into_rounds(sources, mix, seed)
    assert made == mixing.split_into_rounds(sources, mix, seed)
    assert all(part and len(set(part)) == len(part) for part in made)
    taken = Counter(sample for part in made for sample in part)
    weights, epoch = [weight for _, weight in given_sources], sum(len(part) for part in made)
    for number, (source, part) in enumerate(zip(sources, mix, strict=True)):
        times = [taken[sample] for sample in source]
        assert sum(times) == part.taken
        assert min(times) >= 1
        assert max(times) - min(times) <= 1
        wanted = weights[number] / sum(weights)
        assert abs(part.taken - wanted * epoch) <= (len(mix) + 1) / 2 + 1e-6  # each source is rounded by half a sample
        assert part.share == pytest.approx(part.taken / epoch)
        assert sum(sample[0] == number for sequence in made for sample in sequence) == part.taken
    assert {sample for part in made for sample in part} == {sample for source in sources for sample in source}
    assert any(part.taken == part.samples for part in mix), "a source is taken once: an epoch is no longer than it must"


def test_refuses_extreme_weights():
    with pytest.raises(UserError, match="every sample has 1e"):
        mixing.compute_epoch([1000, 1000], [1e-9, 1.0])
    with pytest.raises(UserError, match="every sample has inf"):
        mixing.compute_epoch([10, 10], [5e-324, 1e300])
