"""Test exported files: equal recipes without superpod, formatting, comments, environment, start."""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from superpod.collection import registry
from tests.nemo2.export.exported import COMPLETE, GPU_RECIPES, answers, chosen, complete_files


@pytest.mark.nemo
def test_exported_files_make_equal_recipes_without_superpod():
    assert answers()["wrong"] == {}
    files = {path.stem for path in answers()["folder"].glob("*.py")}
    assert set(chosen()) <= files


@pytest.mark.nemo
def test_exports_nemo_recipes():
    assert answers()["nemo"] == {"llama3_8b.finetune_recipe": [], "deepseek_v3": []}


@pytest.mark.nemo
@pytest.mark.parametrize("name", chosen())
def test_file_does_not_import_superpod(name):
    text = (answers()["folder"] / f"{name}.py").read_text()
    assert not re.search(r"^\s*(from|import) superpod", text, re.MULTILINE)
    assert f'"""{name}\n' in text
    assert "def recipe() -> run.Partial:" in text


@pytest.mark.nemo
@pytest.mark.parametrize("name", complete_files())
def test_a_complete_recipe_is_what_export_writes_today(name, golden):
    golden(COMPLETE / f"{name}.py", (answers()["folder"] / f"{name}.py").read_text())


def test_complete_recipes_cover_every_family_and_task():
    recipes = registry.recipes()
    shown = [recipes[name] for name in complete_files()]
    assert {recipe.model.family for recipe in shown} == {recipe.model.family for recipe in recipes.values()}
    assert {recipe.task for recipe in shown} == {recipe.task for recipe in recipes.values()}


@pytest.mark.nemo
def test_files_are_formatted_like_ruff():
    ruff = shutil.which("ruff") or str(Path(sys.executable).with_name("ruff"))
    if not Path(ruff).exists():
        pytest.skip("ruff is not installed")
    for words in (["format", "--check"], ["check", "--select", "E,F,I,W"]):
        command = [ruff, *words, "--isolated", "--line-length", "100", answers()["folder"]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.nemo
def test_file_has_the_comments_of_the_source():
    text = (answers()["folder"] / "llama3_70b_pretrain_h100_bf16.py").read_text()
    assert "check_for_nan_in_grad=True,  # stop at the first step with non-finite gradients\n" in text
    above = text[: text.index("run.Config(GarbageCollectionCallback")].rstrip().splitlines()
    assert "# All ranks collect garbage at the same steps" in "\n".join(above[-3:])


def before_imports(file):
    """Return the statements before the first import of another package as source."""
    text = file.read_text()
    tree = ast.parse(text)
    imports = (n for n in tree.body if isinstance(n, ast.Import) and n.names[0].name == "nemo_run")
    return "\n".join(text.splitlines()[: next(imports).lineno - 1])


@pytest.mark.nemo
@pytest.mark.parametrize("name", GPU_RECIPES)
def test_file_sets_the_environment(name):
    needed = answers()["environment"][name]
    assert "PYTORCH_CUDA_ALLOC_CONF" in needed
    top = before_imports(answers()["folder"] / f"{name}.py")
    own = {"NCCL_DEBUG": "INFO"}
    script = top + "\nprint(__import__('json').dumps([ENVIRONMENT, dict(os.environ)]))"
    done = subprocess.run([sys.executable, "-c", script], env=own, capture_output=True, text=True, timeout=60)
    carried, environment = json.loads(done.stdout)
    assert carried == needed
    assert {key: environment.get(key) for key in needed} == needed | own, "a user's own values stay"


@pytest.mark.nemo
def test_environment_for_nemo_run_executors():
    assert answers()["executor"] == answers()["environment"][GPU_RECIPES[0]]


@pytest.mark.nemo
def test_constants_are_used_for_all_their_fields():
    assert answers()["edited"] == [8, 4096, 4096, 64, 1e-3, "/scratch/me"]


@pytest.mark.nemo
def test_list_of_texts_is_one_constant():
    (line,) = answers()["data"]
    assert line.startswith('DATA = ["a_text", "b_text"]')


@pytest.mark.nemo
@pytest.mark.parametrize("name", chosen())
def test_file_is_short_and_mentions_no_source_file(name):
    text = (answers()["folder"] / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 300
    assert not re.search(r"\b(recipes|planner|layouts)/[\w/]+\.(py|toml)", text)
    assert not re.search(r'^\s*"decoder",$', text, re.MULTILINE)


@pytest.mark.nemo
def test_writes_stages_as_repetitions():
    text = (answers()["folder"] / "llama31_nemotron_ultra_253b_pretrain_a100_bf16.py").read_text()
    stages = text[text.index("pipeline_model_parallel_layout=[") :].partition("],\n        ckpt")[0]
    assert len(stages.splitlines()) < 12
    assert '["embedding", *["decoder"] * ' in stages


@pytest.mark.nemo
def test_writes_userbuffer_configurations_by_name():
    text = (answers()["folder"] / "llama3_70b_pretrain_h100_bf16.py").read_text()
    assert "userbuffers.userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192" in text


@pytest.mark.nemo
def test_file_starts_processes_on_one_node():
    tiny, big = answers()["started"].values()
    assert tiny[1:3] == ["-m", "torch.distributed.run"]
    assert tiny[-2] == "--nproc-per-node=2"
    assert Path(tiny[-1]).name == "tiny_llama3.py"
    nodes = registry.find("llama3_70b_pretrain_h100_bf16").nodes[0]
    assert big == [f"start this on {nodes} nodes with 8 processes each; see the top of the file"]


@pytest.mark.nemo
def test_writes_every_kind_of_value():
    text = answers()["values"]
    for words in (
        *('float("inf")', "torch.bfloat16", "Color.RED", 'b"raw"', '"it\'s"', "'a \"b\"'", '"line\\nend"', "(1,)"),
        *("frozenset([6])", "set()", "Inner(color=Color.RED, sizes=(2, 3))", 'pathlib.PurePosixPath("a/b")'),
        *("import pathlib", "from exported_values import Color, Inner, function", "run.Partial(function, b=2)"),
    ):
        assert words in text, words


@pytest.mark.nemo
def test_refuses_values_without_source():
    function, ours, thing, twice = answers()["refused"]
    assert "<lambda>, which a standalone file" in function
    assert "superpod.errors.UserError, which a standalone file cannot import" in ours
    assert thing == "value has type object, which Python source cannot express"
    assert "shared differently" in twice
