"""The words of a command line: what they mean, what is printed can be given again, and each option is declared once."""

import inspect
from dataclasses import fields

import pytest

from superpod.cli import option_syntax, plan_options, tables
from superpod.cli.app import app
from superpod.cli.plan_options import PlanOptions
from superpod.errors import UserError
from superpod.planner import explain
from superpod.planner.layout import Layout
from superpod.planner.planned_job import Options

LAYOUTS = (
    Layout(),
    Layout(tp=4, pp=2, vp=2, sp=True, cp=2, ep=8, etp=1, mbs=2),
    Layout(pp=32, chunks=(1, *[2] * 29, 1, 1)),
    Layout(pp=2, vp=2, chunks=(1, 2, 3, 2), recompute="selective", recompute_modules=("mlp", "layernorm")),
    Layout(recompute="full", recompute_method="block", recompute_layers=3, sharding="zero3", loss_as_layer=True),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=explain.as_option)
def test_the_layout_that_is_printed_can_be_given_again(layout):
    assert option_syntax.layout(Layout(), explain.as_option(layout)) == layout


def test_equal_chunks_are_counted():
    assert explain.as_option(LAYOUTS[2]) == "pp=32,chunks=1+29x2+2x1"
    with pytest.raises(UserError, match="20,000 chunks"):
        option_syntax.layout(Layout(), "chunks=20000x1")


@pytest.mark.parametrize(
    ("words", "targets"),
    [
        (["lora_targets=linear_qkv"], ("linear_qkv",)),
        (["lora_targets=linear_qkv,linear_proj"], ("linear_qkv", "linear_proj")),
        (["lora_targets=linear_qkv+linear_fc2,deterministic"], ("linear_qkv", "linear_fc2")),
        (["offload=1,lora_targets=linear_fc1, linear_fc2,lora_rank=8"], ("linear_fc1", "linear_fc2")),
    ],
)
def test_lora_targets_are_names_with_commas(words, targets):
    found = option_syntax.options(Options(), words)
    assert found.lora_targets == targets
    assert found.deterministic == ("deterministic" in words[0])


@pytest.mark.parametrize(
    ("words", "says", "hint"),
    [
        ("lora_targets=linear_qvk", "cannot name 'linear_qvk'", "linear_qkv"),
        ("lora_targets", "names nothing", "linear_qkv"),
        ("linear_qkv", "no option is called 'linear_qkv'", ""),
        ("moments=bf16,fp32", "no option is called 'fp32'", ""),
    ],
)
def test_other_names_are_refused(words, says, hint):
    with pytest.raises(UserError, match=says) as refused:
        option_syntax.options(Options(), [words])
    assert hint in refused.value.hint


def test_a_verb_has_the_shared_options_where_it_wants_them():
    @plan_options.with_plan_options("layout", "fabric")
    def verb(price: int, options: PlanOptions, gpus: str = "8,16", as_json: bool = False) -> None:
        heard.append((price, options, gpus, as_json))

    heard: list[tuple] = []
    names = [f.name for f in fields(PlanOptions) if f.name not in ("layout", "fabric", "name")]
    assert [*inspect.signature(verb).parameters] == ["name", "price", *names, "as_json"]
    assert inspect.signature(verb).parameters["gpus"].default == "8,16"
    verb(name="llama3_8b", price=2, as_json=True, gpus="64", **dict.fromkeys(set(names) - {"gpus"}))
    assert heard == [(2, PlanOptions("llama3_8b"), "64", True)]


def test_the_command_of_another_verb_is_written_so_that_a_shell_takes_it():
    options = PlanOptions("my model.json", layout="tp=2", gpu="h100", gpus=16, option=["moments=bf16", "offload=1"])
    words = "recipes plan 'my model.json' --gpu h100 --gpus 16 --option moments=bf16 --option offload=1"
    assert options.command("plan", without=("layout",)) == words


def test_the_verbs_about_a_run_have_one_order_of_options():
    commands = [(c.name, c.callback) for c in app.registered_commands if c.callback]
    verbs = {name: [*inspect.signature(callback).parameters] for name, callback in commands}
    order = [f.name for f in fields(PlanOptions)]
    for verb in ("check", "memory", "explain", "scale", "cost", "plan"):
        shared = [name for name in verbs[verb] if name in order]
        assert shared == sorted(shared, key=order.index)
        assert len(shared) >= 7


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_folded_table_fits_and_keeps_every_word(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    cell = "TP2 PP8 VP12, mbs 1, embedding and loss as layers, recompute layernorm+moe_act"
    tables.show_folded(["layout", "GiB"], [[cell, "75.3"], ["DP only", "8.0"]])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= columns for line in lines)
    assert [line.split()[0] for line in lines if line.strip().endswith(("75.3", "8.0"))] == ["TP2", "DP"]
    shown = " ".join(line.replace("75.3", "").strip() for line in lines[1:-1])
    assert " ".join(shown.split()) == cell


def test_a_folded_table_is_wider_than_the_terminal_rather_than_cut(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    tables.show_folded(["layout", "GiB"], [["recompute layernorm+mla_up_proj", "75.3"]])
    tables.say("to look closer: --layout tp=2,pp=8,vp=12,cp=2")
    out = capsys.readouterr().out
    assert "layernorm+mla_up_proj" in out
    assert "tp=2,pp=8,vp=12,cp=2" in out
