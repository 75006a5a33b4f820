"""Every argument for a model or recipe accepts any spelling and prints the name it stands for."""

import pytest
import typer

from superpod.cli import spellings
from superpod.cli.app import app

NAMING = {
    **dict.fromkeys(("plan", "check", "memory", "explain", "scale", "cost", "show", "export", "tune"), "name"),
    **dict.fromkeys(("rehearse", "run", "finetune", "submit", "render"), "name"),
    **dict.fromkeys(("list", "fit", "prove"), "words"),
    "diff": "a",
}
"""Argument for a model or recipe, by verb."""


@pytest.mark.parametrize("verb", NAMING)
def test_the_argument_is_normalized(verb, capsys):
    command = typer.main.get_command(app).commands[verb]  # pyright: ignore[reportAttributeAccessIssue]
    argument = next(p for p in command.params if p.name == NAMING[verb])
    given = ["Llama-3.1-8B", "h100"] if NAMING[verb] == "words" else "meta-llama/Llama-3.1-8B"
    read = argument.callback(typer.Context(command), argument, given)
    assert read == (["llama31_8b", "h100"] if NAMING[verb] == "words" else "llama31_8b")
    assert capsys.readouterr().err.count("is interpreted as llama31_8b") == 1


def test_an_exact_name_prints_no_note(capsys):
    assert spellings.normalize_name("llama3_8b_pretrain_h100_bf16") == "llama3_8b_pretrain_h100_bf16"
    assert spellings.normalize_words(["llama3_8b", "sft"]) == ["llama3_8b", "sft"]
    assert spellings.normalize_words(None) is None
    assert capsys.readouterr().err == ""


def test_a_recipe_in_another_spelling_is_checked(recipes_cli):
    done = recipes_cli("check", "Llama-3.1-8B-pretrain-H100-bf16")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(
        "note: Llama-3.1-8B-pretrain-H100-bf16 is interpreted as llama31_8b_pretrain_h100_bf16"
    )
