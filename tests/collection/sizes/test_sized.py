"""Test recipes at other sizes, sequence lengths, batch sizes and layouts."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from superpod.collection import recipe_job, registry
from superpod.collection.registry import find
from superpod.collection.sizes import better_layout, tune
from superpod.collection.sizes import sized as sized_module
from superpod.collection.sizes.sized import (
    BATCH_TOLERANCE,
    Size,
    SizedRecipe,
    adapt,
    compute_requested_batch,
    find_sized,
)
from superpod.errors import UserError
from superpod.planner import legality, plans, predict
from superpod.planner.layout import Layout

NAME = "llama3_8b_pretrain_h100_bf16"
M = 2**20


def test_declared_size_returns_the_recipe():
    assert adapt(find(NAME), Size()) is find(NAME)
    assert adapt(find(NAME), Size(num_nodes=4)) is find(NAME)


def test_two_nodes_at_4096_with_a_batch_of_4m_tokens():
    recipe = find_sized(NAME, Size(2, seq=4096, batch_tokens=4 * M))
    job = recipe_job.job(recipe)
    assert (job.gpus, job.seq, job.layout.gbs, job.tokens) == (16, 4096, 1024, 4 * M)
    assert job.layout == find(NAME).layout(2).replace(gbs=1024)
    assert predict.one(job).verdict == "ok"
    assert isinstance(recipe, SizedRecipe)
    assert recipe.notes == ("tokens per step: 4,194,304 (gbs 1,024 x seq 4,096)",)


def test_undeclared_size_is_planned_with_a_note():
    recipe = find_sized(NAME, Size(16))
    assert isinstance(recipe, SizedRecipe)
    assert recipe.nodes == (16,)
    assert predict.one(recipe_job.job(recipe)).verdict == "ok"
    (note,) = recipe.notes
    for words in ("16 nodes is not a declared size", "planned now", "not proven", f"recipes prove {NAME} --nodes 16"):
        assert words in note


@pytest.mark.parametrize("name", ["llama3_70b_pretrain_h100_bf16", "llama3_8b_pretrain_b200_mxfp8", "tiny_llama3_lora"])
def test_planned_layout_fits_with_the_built_options(name):
    """Options that depend on the layout (DeepEP, MXFP8 parameters) are set after the search."""
    declared = find(name).nodes
    nodes = next(n for n in range(declared[0] + 2, 40, 2) if n not in declared)
    job = recipe_job.job(find_sized(name, Size(nodes)))
    assert (legality.violations(job), predict.one(job).verdict) == ([], "ok")


def test_notes_tokens_per_step_for_other_sequence_length():
    recipe = find_sized(NAME, Size(seq=16384))
    assert isinstance(recipe, SizedRecipe)
    (note,) = recipe.notes
    assert "4,194,304 before, 8,388,608 now" in note
    assert "--batch-tokens 4194304 keeps them" in note
    kept = find_sized(NAME, Size(seq=16384, batch_tokens=4194304))
    assert recipe_job.job(kept).tokens == 4194304


@pytest.mark.parametrize(
    ("size", "says", "moves"),
    [
        (
            Size(gbs=510),
            "must be a multiple of mbs 1 x dp 4",
            "--gbs 508 (4,161,536 tokens) or --gbs 512 (4,194,304 tokens)",
        ),
        (Size(batch_tokens=9000), "must be a multiple of mbs 1 x dp 4", "--gbs 4"),
        (Size(gbs=0), "--gbs is 0; it must be between 1 and", "the value from the recipe"),
        (Size(seq=2**40), "--seq is 1,099,511,627,776", "the value from the recipe"),
        (Size(num_nodes=-1), "--nodes is -1; it must be between 1 and", "the value from the recipe"),
        (Size(batch_tokens=100), "with 8,192 tokens per sample", "--batch-tokens 4194304"),
        (Size(gbs=256, batch_tokens=4 * M), "is 2,097,152 tokens", "pass only one"),
        (Size(num_nodes=3000), "no legal layout of llama3_8b_pretrain_h100_bf16 fits 3,000 nodes", "--nodes 2048"),
    ],
)
def test_refuses_invalid_sizes(size, says, moves):
    with pytest.raises(UserError) as refused:
        find_sized(NAME, size)
    assert says in str(refused.value)
    assert moves in refused.value.hint


def test_batch_tokens_are_rounded_to_a_legal_batch():
    recipe = find_sized(NAME, Size(seq=4096, batch_tokens=4_000_000))
    assert recipe.layout().gbs == 976
    assert isinstance(recipe, SizedRecipe)
    assert "3,997,696" in recipe.notes[-1]
    assert "4,000,000 (-0.1%)" in recipe.notes[-1]


def test_interleaved_pipeline_needs_multiple_of_pp():
    """With virtual stages, the number of micro-batches must be a multiple of pp."""
    layout = Layout(pp=4, vp=4, gbs=512)
    with pytest.raises(UserError, match=r"x pp 4 \(interleaved pipeline\)"):
        find_sized(NAME, Size(gbs=511, layout=layout))
    recipe = find_sized(NAME, Size(batch_tokens=510 * 8192, layout=layout))
    assert recipe.layout().gbs == 512
    assert legality.violations(recipe_job.job(recipe)) == []


@pytest.mark.parametrize(("name", "row"), [("starcoder_15b_sft_h100_bf16", 8192), ("e5_340m_sft_h100_bf16", 512)])
def test_refuses_other_length_for_learned_positions(name, row):
    with pytest.raises(UserError, match=f"{row} learned positions"):
        find_sized(name, Size(seq=row // 2))


def test_learned_positions_grow_in_pretraining():
    recipe = find_sized("gpt3_175b_pretrain_h100_bf16", Size(seq=4096))
    before = find("gpt3_175b_pretrain_h100_bf16").shape
    assert recipe.shape.positions == 4096
    assert recipe.shape.parameters().total - before.parameters().total == 2048 * before.hidden


def test_suggests_better_layout():
    long = find_sized(NAME, Size(seq=131072))
    assert predict.one(recipe_job.job(long)).verdict == "oom"
    assert "and it fits" in better_layout.describe_better_layout(long)
    best = find_sized(NAME, Size(seq=131072, best=True))
    assert predict.one(recipe_job.job(best)).verdict == "ok"
    assert better_layout.describe_better_layout(best) == ""


FAMILIES = sorted({(r.model.family, r.task): r.name for r in registry.recipes().values() if r.seq <= 32768}.values())


def test_accepted_sizes_match_the_request():
    """For every family and task, the sequence length equals the request, and the batch size equals it or is noted."""
    verdicts: list[bool] = []

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(
        name=st.sampled_from(FAMILIES),
        seq=st.one_of(st.none(), st.sampled_from([512, 2048, 4096, 6144, 16384])),
        batch=st.one_of(st.none(), st.integers(1, 4096), st.sampled_from([M, 4 * M, 4_000_000])),
        as_tokens=st.booleans(),
    )
    def drawn(name: str, seq: int | None, batch: int | None, as_tokens: bool) -> None:
        verdicts.append(taken(find(name), Size(None, seq, None if as_tokens else batch, batch if as_tokens else None)))

    drawn()
    assert verdicts.count(True) >= 20
    assert verdicts.count(False) >= 5


def taken(recipe, size) -> bool:
    """Return whether the size is accepted, and check the result or the hint of the refusal."""
    try:
        result = adapt(recipe, size)
    except UserError as refused:
        if not refused.hint:
            raise
        return False
    job = recipe_job.job(result)
    assert job.seq == result.seq == (size.seq or recipe.seq)
    batch = size.gbs or size.batch_tokens
    assert not [rule for rule in legality.violations(job) if rule.rule in ("gbs", "micro_batches") and batch]
    if size.gbs:
        assert job.layout.gbs == batch
    elif batch:
        assert abs(job.tokens / batch - 1) <= BATCH_TOLERANCE
        assert isinstance(result, SizedRecipe)
        assert f"{job.tokens:,}" in result.notes[-1]
    else:
        assert job.layout.gbs == recipe.layout().gbs
    assert replace(job.layout, gbs=1) == replace(recipe.layout(), gbs=1)
    return True


def test_batch_for_unplanned_layout_has_many_divisors():
    recipe = find(NAME)
    assert compute_requested_batch(recipe, Size(seq=6144, batch_tokens=4 * M)) == 672
    assert compute_requested_batch(recipe, Size(seq=4096, batch_tokens=4 * M)) == 1024
    assert compute_requested_batch(recipe, Size(gbs=77)) == 77


def test_suggests_better_batch_size():
    result = adapt(find("llama3_8b_pretrain_h100_bf16"), Size(num_nodes=33))
    better = adapt(find("llama3_8b_pretrain_h100_bf16"), Size(num_nodes=33, gbs=528))
    assert isinstance(result, SizedRecipe)
    assert isinstance(better, SizedRecipe)
    (note,) = [note for note in result.notes if "allows few layouts" in note]
    assert "--gbs 528 increases" in note
    speeds = [job.tokens / plans.seconds(job) for job in map(recipe_job.job, (result, better))]
    assert speeds[1] > 1.1 * speeds[0]
    assert not [note for note in better.notes if "allows few layouts" in note]


def test_plans_once(monkeypatch):
    """The search takes a second, so the comparison with a better batch size reuses the planned job."""
    recipe, searched, best = find("llama3_8b_pretrain_h100_bf16"), [], tune.best_job
    monkeypatch.setattr(tune, "best_job", lambda *given: searched.append(given[1:]) or best(*given))
    sized_module._adapt.cache_clear()
    adapt(recipe, Size(num_nodes=33))
    assert searched == [(33, 512), (33, 528)]
    searched.clear()
    adapt(recipe, Size(num_nodes=16))
    assert searched == [(16, 512)]
