"""What a user's mistake shows: one clear message, exit code 2, no traceback. All before NeMo is imported."""

import json

import pytest

from superpod.recipes.registry import recipes


@pytest.mark.parametrize(
    ("words", "says", "hint"),
    [
        (["show", "tiny_lama3"], "no recipe is called 'tiny_lama3'", "tiny_llama3"),
        (["run", "tiny_lama3"], "no recipe is called 'tiny_lama3'", "tiny_llama3"),
        (["run", 'it\'s; a "name" $(id)'], "no recipe is called", "recipes list"),
        (["run", "tiny_llama3", "--data", "no such folder"], "no such folder", ""),
        (["run", "llama3_70b_pretrain_h100_bf16", "--nodes", "3"], "laid out for 4, 8, 16, 32 nodes", "16"),
        (["run", "tiny_llama3", "--resume", "last"], "no run of tiny_llama3", "without --resume"),
        (["run", "tiny_llama3", "--resume", "/nowhere"], "/nowhere is no run folder", ""),
        (["report", "/nowhere"], "/nowhere is no run folder", ""),
        (["frobnicate"], "No such command 'frobnicate'", ""),
        (["run"], "Missing argument", ""),
        (["run", "tiny_llama3", "--daat", "x"], "No such option", ""),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(words, says, hint, recipes_cli, tmp_path):
    done = recipes_cli(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())
    assert hint in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_list_json_is_what_the_registry_holds(recipes_cli):
    facts = json.loads(recipes_cli("list", "--json").stdout)
    assert [f["name"] for f in facts] == list(recipes())
    assert all(f["layouts"] and f["title"] for f in facts)


def test_list_filters_by_words(recipes_cli):
    assert [f["name"] for f in json.loads(recipes_cli("list", "tiny", "fp32", "--json").stdout)] == ["tiny_llama3_fp32"]


def test_a_closed_pipe_is_no_error(recipes_cli):
    import shlex
    import subprocess
    import sys

    command = f"{shlex.quote(sys.executable)} -m superpod.cli list --json | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[\n"
    assert done.stderr == ""
