"""Test properties of all built recipes; goldens cover the values."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from superpod.collection.registry import recipes
from tests.nemo2.describe import firsts

pytestmark = pytest.mark.nemo


def test_layout_round_trip(described):
    _survive(described)


@pytest.mark.long
def test_layout_round_trip_of_all_recipes(all_described):
    _survive(all_described)


def _survive(described):
    assert described["sizes"]
    for name, nodes, num_nodes, layout in described["sizes"]:
        assert (num_nodes, layout) == (nodes, declared(name, nodes)), name
    for name, (nodes, num_nodes, layout, save_every) in described["smallest"].items():
        assert (num_nodes, layout, save_every) == (nodes, declared(name, nodes), recipes()[name].saves[nodes]), name


def declared(name, nodes):
    return json.loads(json.dumps(vars(recipes()[name].layouts[nodes])))


def test_round_trip_of_all_layout_fields(described):
    for layout, read in described["round_trips"]:
        assert read == layout


@pytest.mark.parametrize("name", [recipe.name for recipe in firsts().values()])
def test_every_value_has_a_source_line(name, described):
    for path, _, where in described["lines"][name]:
        if path != "recipe":
            assert where.startswith(("recipes/", "collection/", "nemo2/", "default of ")), (path, where)


@pytest.mark.parametrize("name", ["llama3_8b_pretrain_h100_bf16", "llama3_70b_pretrain_h100_bf16"])
def test_layout_values_have_the_line_of_the_layout_file(name, described):
    """Includes sizes with a separate line, like the smallest of both."""
    file = recipes()[name].source
    lines, layout = file.read_text().splitlines(), recipes()[name].layout()
    where = {path: where for path, _, where in described["lines"][name]}
    for field, key in (("trainer.strategy.tensor_model_parallel_size", "tp"), ("data.global_batch_size", "gbs")):
        path, _, number = where[field].rpartition(":")
        assert path == f"recipes/layouts/{file.name}"
        assert f"{key}={getattr(layout, key)}" in lines[int(number) - 1]


def test_nemo_run_finds_every_recipe(described):
    factories = described["factories"]
    for name, recipe in recipes().items():
        assert name in factories["pretrain" if recipe.task == "pretrain" else "finetune"]


FIRSTS = list(firsts().values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [FIRSTS[0], *(pytest.param(recipe, marks=pytest.mark.long) for recipe in FIRSTS[60::60])],
    ids=lambda recipe: recipe.name,
)
def test_nemo_command_accepts_recipe(recipe):
    command = Path(sys.executable).parent / "nemo"
    verb = "pretrain" if recipe.task == "pretrain" else "finetune"
    words = [command, "llm", verb, "--factory", recipe.name, "--dryrun"]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert f"Dry run for {verb}" in done.stdout, done.stderr[-2000:]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("one_in", [pytest.param(30, marks=pytest.mark.slow), pytest.param(10, marks=pytest.mark.long)])
@pytest.mark.timeout(1800)
def test_nemo_command_accepts_one_in(one_in):
    command = [sys.executable, "-W", "ignore", Path(__file__).with_name("commands.py"), str(one_in)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1700)
    result = json.loads(done.stdout.rpartition("RESULT")[2])
    assert result["asked"] >= len(recipes()) // one_in
    assert result["wrong"] == {}


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("trainer.max_steps=10", "trainer.max_steps = 10  # command line"),
        ("model.config.num_layers*=2", "model.config.num_layers = 8  # command line"),
        ("trainer.devices=4", "trainer.devices = 4  # command line"),
        ("trainer.callbacks[1].gc_interval_train=7", "trainer.callbacks[1].gc_interval_train = 7  # command line"),
    ],
)
def test_override_changes_one_value(override, line, described):
    assert described["overrides"][override] == ["changed", line]


@pytest.mark.parametrize(
    ("override", "says", "hint"),
    [
        ("trainer.max_stepz=10", "trainer has no field 'max_stepz'", "max_steps"),
        ("trainer.strategy.tensor_model_paralel_size=2", "no field", "tensor_model_parallel_size"),
        ("optim.config.lr=fast", "optim.config.lr must be of type Optional[float], not 'fast'", ""),
        ("trainer.max_steps=1e3", "trainer.max_steps must be of type int, not '1e3'", "trainer.max_steps=1000"),
        ("trainer.max_steps=1000.5", "trainer.max_steps must be of type int, not '1000.5'", "a value of type int"),
        ("trainer.callbacks[9].gc_interval_train=1", "there is no item [9]", "3 items"),
        ("trainer.max_steps.more=1", "trainer.max_steps is 60 and has no fields", ""),
        ("max_steps", "'max_steps' is not an override", "write PATH=VALUE"),
        ("__class__=1", "the recipe has no field '__class__'", ""),
    ],
)
def test_refuses_invalid_override(override, says, hint, described):
    how, message, next_move = described["overrides"][override]
    assert how == "refused"
    assert says in message
    assert hint in next_move


@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("full_recompute", "model.config.recompute_granularity = 'full'"),
        ("offload_optimizer", "optim.config.optimizer_cpu_offload = True"),
        ("offload_activations", "model.config.cpu_offloading_num_layers = 3"),
        ("fsdp", "trainer.strategy.fsdp = 'megatron'"),
        ("precision_aware", "optim.config.exp_avg_dtype = torch.bfloat16"),
        ("cuda_graphs", "model.config.cuda_graph_impl = 'local'"),
        ("deterministic", "model.config.deterministic_mode = True"),
        ("stragglers", "trainer.callbacks[3].stop_if_detected = False"),
        ("fault_tolerance", "trainer.callbacks[3].calculate_timeouts = True"),
    ],
)
def test_option_is_recorded_as_command_line(option, changes, described):
    how, *lines = described["overrides"][f"with={option}"]
    assert how == "changed"
    assert f"{changes}  # command line" in lines
    fields = [line for line in lines if "Callback  #" not in line]  # a callback itself stands where the recipe is built
    assert all(line.endswith("# command line") for line in fields)


def test_refuses_full_recompute_with_adapters(described):
    how, message, _ = described["overrides"]["tiny_llama3_lora with=full_recompute"]
    assert how == "refused"
    assert "adapters" in message


@pytest.mark.parametrize(("number", "option"), [(1, "precision_aware"), (2, "offload_optimizer")])
def test_refuses_options_that_need_the_distributed_optimizer(number, option, described):
    says = [f"{option} needs the distributed optimizer, but this recipe does not shard its optimizer"]
    refused = {name: shown[number][:1] for name, shown in described["shards"].items()}
    assert refused == {name: [] if shown[0] else says for name, shown in described["shards"].items()}
    assert {recipes()[name].task for name, said in refused.items() if said} == {"lora"}, "DoRA's goldens are LoRA's"


def test_refuses_conflicting_options(described):
    how, message, _ = described["overrides"]["with=offload_activations,full_recompute"]
    assert (how, "cannot be combined" in message) == ("refused", True)


def test_refuses_unknown_option(described):
    how, message, hint = described["overrides"]["with=full_recompute,fsdpp"]
    assert (how, message) == ("refused", "unknown option 'fsdpp'")
    assert "fsdp" in hint
