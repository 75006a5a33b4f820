"""What holds of every built recipe; the goldens hold the rest."""

import json

import pytest

from superpod.recipes.registry import recipes

pytestmark = pytest.mark.nemo

PUBLISHED = {  # parameters as the model cards give them, billions
    "llama3_8b_pretrain_h100_bf16": 8.03,
    "llama3_70b_pretrain_h100_bf16": 70.55,
    "llama31_405b_pretrain_h100_bf16": 405.85,
    "llama32_1b_pretrain_h100_bf16": 1.236,
    "llama32_3b_pretrain_h100_bf16": 3.213,
}


@pytest.mark.parametrize("name", recipes())
def test_layout_survives_the_way_to_nemo_and_back(name, described):
    for nodes, (num_nodes, layout) in described["sizes"][name].items():
        assert num_nodes == int(nodes)
        assert layout == json.loads(json.dumps(vars(recipes()[name].layouts[int(nodes)])))


def test_stages_recomputation_and_sharding_survive_it_too(described):
    for layout, read in described["round_trips"]:
        assert read == layout


@pytest.mark.parametrize("name", recipes())
def test_every_value_knows_its_line(name, described):
    for path, _, where in described["lines"][name]:
        if path != "recipe":
            assert where.startswith(("recipes/", "default of ")), (path, where)


def test_layout_values_point_into_the_layout_file(described):
    where = {path: where for path, _, where in described["lines"]["llama3_70b_pretrain_h100_bf16"]}
    assert where["trainer.strategy.tensor_model_parallel_size"] == "recipes/layouts/llama3_70b.toml:4"
    assert where["data.global_batch_size"] == "recipes/layouts/llama3_70b.toml:9"


def test_the_line_of_one_size_is_found(described):
    where = {path: where for path, _, where in described["lines"]["llama3_8b_pretrain_h100_bf16"]}
    assert where["trainer.strategy.tensor_model_parallel_size"] == "recipes/layouts/llama3_8b.toml:7"


@pytest.mark.parametrize("name", PUBLISHED)
def test_megatron_builds_a_model_of_the_published_size(name, described):
    """First, middle and last pipeline rank, real Megatron-Core: the stages between are like the middle one."""
    layout = recipes()[name].layout()
    stages = [sum(chunks) for chunks in described["dry"][name]]
    if layout.pp == 1:
        total = stages[0] * layout.tp
    else:
        first, middle, last = stages
        total = (first + middle * (layout.pp - 2) + last) * layout.tp
    # Norms are whole on every tensor-parallel rank, so the sum is a little high.
    assert total / 1e9 == pytest.approx(PUBLISHED[name], rel=2e-3)
    assert all(len(chunks) == (layout.vp or 1) for chunks in described["dry"][name])


def test_nemo_run_finds_every_recipe(described):
    assert set(recipes()) <= set(described["factories"])


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("trainer.max_steps=10", "trainer.max_steps = 10  # command line"),
        ("model.config.num_layers*=2", "model.config.num_layers = 8  # command line"),
        ("trainer.devices=4", "trainer.devices = 4  # command line"),
        ("trainer.callbacks[1].gc_interval_train=7", "trainer.callbacks[1].gc_interval_train = 7  # command line"),
    ],
)
def test_an_override_changes_its_value_and_nothing_else(override, line, described):
    assert described["overrides"][override] == ["changed", line]


@pytest.mark.parametrize(
    ("override", "says", "hint"),
    [
        ("trainer.max_stepz=10", "trainer has no field 'max_stepz'", "max_steps"),
        ("trainer.strategy.tensor_model_paralel_size=2", "no field", "tensor_model_parallel_size"),
        ("optim.config.lr=fast", "optim.config.lr takes Optional[float], not 'fast'", ""),
        ("trainer.callbacks[9].gc_interval_train=1", "there is no item [9]", "3 items"),
        ("trainer.max_steps.more=1", "trainer.max_steps is 60 and has no fields", ""),
        ("max_steps", "'max_steps' is not an override", "path=value"),
        ("__class__=1", "the recipe has no field '__class__'", ""),
    ],
)
def test_a_wrong_override_is_refused(override, says, hint, described):
    how, message, next_move = described["overrides"][override]
    assert how == "refused"
    assert says in message
    assert hint in next_move
