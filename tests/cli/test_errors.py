"""A user's mistake is one clear message and exit code 2, with no traceback, before NeMo is imported."""

import shlex
import subprocess
import sys

import pytest

from tests.cli.planning import SMALL

GPUS = ("--gpu", "h100", "--gpus", "8")


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
        (["plan", "llama3_8c", "--gpu", "h100", "--gpus", "8"], "no model is called 'llama3_8c'", ""),
        (["plan", "llama3_8c", "--gpu", "h100", "--gpus", "8"], "did you mean llama3_8b or", ""),
        (["plan", "llama3_8b"], "say on which GPU", ""),
        (["plan", "llama3_8b", "--gpu", "h1000", "--gpus", "8"], "no node is called 'h1000'", ""),
        (["plan", "llama3_8b", "--gpu", "h100"], "say on how many GPUs", ""),
        (["plan", "llama3_8b", "--gpu", "h100", "--gpus", "0"], "--gpus is 0", ""),
        (["plan", *SMALL, "--gbs", "-5"], "--gbs is -5", ""),
        (["plan", *SMALL, "--precision", "fp7"], "no precision is called 'fp7'", ""),
        (["plan", *SMALL, "--fix", "tq=3"], "no layout key that can be fixed is called 'tq'", ""),
        (["plan", *SMALL, "--memory-cap", "nan"], "--memory-cap is nan", ""),
        (["plan", *SMALL, "--from", "no such file"], "no such file cannot be read", ""),
        (["plan", *SMALL, "--hardware", "/nowhere.toml"], "/nowhere.toml cannot be read", ""),
        (["plan", *SMALL, "--option", "moment=bf16"], "no option is called 'moment'", ""),
        (["plan", *SMALL, "--option", "moments=9"], "moments", ""),
        (["check", "llama3_8b", "--gpu", "h100", "--nodes", "1", "--layout", "tp=x"], "tp takes a whole number", ""),
        (["check", "llama3_8b", "--gpu", "h100", "--nodes", "1", "--layout", "tp=1,tp=2"], "tp twice", ""),
        (["check", "llama3_8b_pretrain_h100_bf15"], "llama3_8b_pretrain_h100_bf16", ""),
        (["memory", "llama3_8b", "--gpu", "h100", "--nodes", "1", "--layout", "tp=3"], "tp 3", ""),
        (["cost", "tiny_llama3", "--tokens", "lots"], "--tokens is 'lots'", ""),
        (["scale", "llama3_8b", "--gpu", "h100", "--gpus", "8,,x"], "--gpus is '8,,x'", ""),
        (["predict", "--from", "none.csv", "--out", "o.csv"], "none.csv cannot be read", ""),
        (
            ["plan", "layers=2,hidden=64,heads=3,vocab=10", "--gpu", "h100", "--gpus", "8"],
            "hidden 64 is no multiple",
            "",
        ),
        (["plan", "layers=2,hidden", *GPUS], "hidden", ""),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(words, says, hint, recipes_cli, tmp_path):
    done = recipes_cli(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())
    assert hint in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_closed_pipe_is_no_error(recipes_cli):
    command = f"{shlex.quote(sys.executable)} -m superpod.cli list --json | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[\n"
    assert done.stderr == ""
