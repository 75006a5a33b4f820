"""Options that the planning verbs share."""

import inspect
import json
from dataclasses import fields

import pytest

from superpod.cli.app import app
from superpod.cli.options import plan_options
from superpod.cli.options.plan_options import PlanOptions
from tests.cli.planning.small_plans import printed

GPUS = ("--gpu", "h100", "--gpus", "16")


def test_shared_options_replace_the_parameter():
    @plan_options.with_plan_options("layout", "fabric")
    def verb(price: int, options: PlanOptions, gpus: str = "8,16", as_json: bool = False) -> None:
        calls.append((price, options, gpus, as_json))

    calls: list[tuple] = []
    names = [f.name for f in fields(PlanOptions) if f.name not in ("layout", "fabric", "name")]
    assert [*inspect.signature(verb).parameters] == ["name", "price", *names, "as_json"]
    assert inspect.signature(verb).parameters["gpus"].default == "8,16"
    verb(name="llama3_8b", price=2, as_json=True, gpus="64", **dict.fromkeys(set(names) - {"gpus"}))
    assert calls == [(2, PlanOptions("llama3_8b"), "64", True)]


def test_the_command_line_is_quoted_for_a_shell():
    options = PlanOptions("my model.json", layout="tp=2", gpu="h100", gpus=16, option=["moments=bf16", "offload=1"])
    words = "recipes plan 'my model.json' --gpu h100 --gpus 16 --option moments=bf16 --option offload=1"
    assert options.command("plan", without=("layout",)) == words


def test_planning_verbs_have_the_same_order_of_options():
    commands = [(c.name, c.callback) for c in app.registered_commands if c.callback]
    verbs = {name: [*inspect.signature(callback).parameters] for name, callback in commands}
    order = [f.name for f in fields(PlanOptions)]
    for verb in ("check", "memory", "explain", "scale", "cost", "plan"):
        shared = [name for name in verbs[verb] if name in order]
        assert shared == sorted(shared, key=order.index)
        assert len(shared) >= 7


@pytest.mark.parametrize("name", ["llama31_8b", "llama3_8b", "meta-llama/Llama-3.1-8B"])
@pytest.mark.slow
def test_the_title_has_the_given_name_of_the_model(name, recipes_cli):
    wanted = "llama3_8b" if name == "llama3_8b" else "llama31_8b"
    assert printed(recipes_cli, "plan", name, *GPUS).startswith(f"{wanted}, 16 x h100")
    assert printed(recipes_cli, "check", name, *GPUS, "--layout", "tp=2").startswith(f"{wanted} pretrain, 16 x h100")
    plan = json.loads(printed(recipes_cli, "plan", name, *GPUS, "--json"))
    assert plan["query"]["model"] == wanted
