"""Megatron's layout strings: read as Megatron reads them, refused as it refuses them, and written so that it can."""

import math
from collections import deque

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from superpod.errors import UserError
from superpod.planner.models import stages
from superpod.planner.rules import pipeline_layout
from superpod.planner.timing import schedule
from tests.run_module import run_module


@pytest.mark.nemo
@pytest.mark.slow
def test_megatron_reads_random_strings_in_the_same_way():
    run_module("tests.planner.compare_layout_strings", 20_000)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("Et*3|(tt|)*2mL", ("Ettt", "tt", "tt", "mL")),
        ("Et,t|t*2,L", ("Ett", "ttL")),
        ("E|t|L", ("E", "t", "L")),
    ],
)
def test_a_string_is_its_stages(text, read):
    assert pipeline_layout.parse(text) == read
    assert pipeline_layout.parse(pipeline_layout.from_chunks(pipeline_layout.count_layers(read), "m" in text)) == read


@pytest.mark.parametrize("text", ["t*999999999999", "(t*99999|)*99999", "x", "((tt|)*2)*2", "E t|L", "t*9" * 20_000])
def test_what_megatron_does_not_read_is_refused_at_once(text):
    with pytest.raises(UserError, match="the pipeline layout"):
        pipeline_layout.parse(text)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=40), st.integers(0, 3))
def test_what_is_written_is_read_back(chunks, mtp):
    written = pipeline_layout.from_chunks(chunks, mtp)
    read = pipeline_layout.parse(written)
    assert pipeline_layout.count_layers(read) == tuple(chunks)
    assert pipeline_layout.refusal(read, 1, sum(chunks), mtp) == ""


def test_a_job_s_layers_are_written_as_they_lie(run):
    uneven = run("llama31_405b", gpus=512, tp=8, pp=8, vp=2, embedding_as_layer=True, loss_as_layer=True, sp=True)
    assert pipeline_layout.from_job(uneven) == "Et*7|(t*8|)*14t*7L"
    assert pipeline_layout.from_job(run(gpus=8, tp=8)) == ""


@settings(max_examples=300)
@given(st.integers(1, 130), st.integers(2, 20), st.integers(1, 5), st.floats(0, 12))
def test_no_chunk_before_a_head_takes_longer_than_it_must(layers, pp, vp, head):
    assume(layers >= pp * vp)
    chunks = stages.chunks_before_head(layers, pp, vp, head)
    if not chunks:
        assert vp > 1
        assert head > (layers - 1) // (pp * vp)
        return
    *others, last = chunks
    assert (sum(chunks), len(chunks), min(chunks) >= 0) == (layers, pp * vp, True)
    assert max(others) - min(others) <= 1
    slowest = min(max(-(-(layers - n) // (pp * vp - 1)), n + head) for n in range(layers // (pp * vp) + 1))
    assert max(*others, last + head) <= (slowest if vp == 1 else math.ceil(slowest)) + 1e-6


@pytest.mark.parametrize(
    ("layers", "pp", "vp", "head"), [(32, 4, 1, 2.4), (32, 4, 2, 2.4), (94, 8, 3, 1.0), (61, 8, 2, 3.2)]
)
def test_the_sum_of_a_full_rank_is_what_its_schedule_takes(layers, pp, vp, head):
    """The search prices a rank by the sum of its chunks; simulated chunk by chunk, these stages take as long."""
    chunks = stages.chunks_before_head(layers, pp, vp, head)
    per_rank = [sum(chunks[rank::pp]) + head * (rank == pp - 1) for rank in range(pp)]
    closed = schedule.closed_form(per_rank, [2 * time for time in per_rank], 16 * pp, vp=vp)
    assert simulated(chunks, pp, vp, head, 16 * pp) == pytest.approx(closed, rel=0.02)


def simulated(chunks, pp, vp, head, micro_batches):
    """Seconds of a step whose layers take a second forward and two backward, the head behind the last chunk."""
    waiting = [deque(schedule.order(rank, pp, vp, micro_batches)) for rank in range(pp)]
    done, free = {}, [0.0] * pp
    while any(waiting):
        for rank in range(pp):
            while waiting[rank] and (ready := schedule._ready(rank, waiting[rank][0], pp, vp, done, 0.0)) is not None:
                one = waiting[rank].popleft()
                layers = chunks[one[1] * pp + rank] + head * (one[1] == vp - 1 and rank == pp - 1)
                free[rank] = done[rank, one] = max(free[rank], ready) + layers * (1 if one[0] == "forward" else 2)
    return max(free)
