"""The command line that users script against: a change of it is a change of this golden."""

import subprocess
import sys

import pytest
from typer.main import get_command

from superpod.cli.app import app
from tests.cli.planning import SMALL

LIGHT = [
    ["--help"],
    ["list"],
    ["list", "--json"],
    ["doctor"],
    ["doctor", "--json"],
    ["data", "--help"],
    ["run", "--help"],
    ["finetune", "--help"],
    ["ckpt", "list", "--help"],
]


def surface(command, path="recipes"):
    for parameter in command.params:
        names = " ".join([*parameter.opts, *parameter.secondary_opts])
        if "completion" not in names:
            kind = "argument" if parameter.param_type_name == "argument" else "option"
            yield f"{path}  {kind} {names}  {'required' if parameter.required else f'default {parameter.default}'}"
    for name, child in sorted(getattr(command, "commands", {}).items()):
        yield f"{path} {name}"
        yield from surface(child, f"{path} {name}")


def test_the_surface_is_frozen(golden):
    golden("cli.txt", "\n".join(surface(get_command(app))) + "\n")


OF_WHOLE_NODES = {
    "recipes cluster bisect",  # asks Slurm for nodes
    "recipes cluster health",
    "recipes diff",  # NeMo's own recipes, which it compares with, take nodes
}


def test_a_verb_that_takes_a_number_of_nodes_takes_a_number_of_gpus_too():
    options = [line.partition("  option ") for line in surface(get_command(app))]
    with_nodes, with_gpus = (
        {path for path, _, option in options if option.startswith(name)} for name in ("--nodes ", "--gpus ")
    )
    assert with_nodes - with_gpus == OF_WHOLE_NODES


@pytest.mark.parametrize("words", LIGHT, ids=" ".join)
def test_light_verbs_import_nothing_heavy(words):
    command = [sys.executable, "-X", "importtime", "-m", "superpod.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "typer" in imported
    assert not imported & {"torch", "nemo", "nemo_run", "megatron", "lightning", "transformers", "numpy", "matplotlib"}


@pytest.mark.parametrize("words", [["plan", *SMALL], ["check", "llama3_8b_pretrain_h100_bf16"]], ids=" ".join)
def test_planning_needs_no_torch(words):
    command = [sys.executable, "-X", "importtime", "-m", "superpod.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "numpy" in imported
    assert not imported & {"torch", "nemo", "nemo_run", "megatron", "lightning", "transformers", "scipy", "matplotlib"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_there(shell, recipes_cli):
    done = recipes_cli("--show-completion", shell, env={"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"})
    assert done.returncode == 0, done.stderr
    assert "_RECIPES_COMPLETE" in done.stdout or "complete_" in done.stdout
