"""`recipes export` and `recipes diff` as a user types them."""

import json

import pytest


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["export", "tiny_llama3", "--to", "torch.py"], "would hide a module"),
        (["export", "tiny_llama3", "--to", "there.py"], "there.py exists already"),
        (["export", "tiny_llama3", "--to", "mine.txt"], "no name of a Python module"),
        (["export", "tiny_lama3", "--to", "mine.py"], "no recipe is called 'tiny_lama3'"),
        (["export", "tiny_llama3", "max_steps", "--to", "mine.py"], "'max_steps' is not an override"),
        (["export", "tiny_llama3", "--nodes", "7", "--to", "mine.py"], "not for 7"),
        (["export", "tiny_llama3", "--data", "none", "--to", "mine.py"], "none"),
        (["export", "tiny_llama3"], "Missing option"),
        (["diff", "tiny_llama3"], "Missing argument"),
    ],
)
def test_a_mistake_is_said_before_nemo_is_imported(words, says, recipes_cli, tmp_path):
    (tmp_path / "there.py").write_text("mine")
    done = recipes_cli(*words, cwd=tmp_path, timeout=30)
    assert done.returncode == 2, done.stderr
    assert says in " ".join(done.stderr.split())
    assert [path.name for path in tmp_path.iterdir()] == ["there.py"]
    assert (tmp_path / "there.py").read_text() == "mine"


@pytest.mark.nemo
def test_export_writes_the_recipe_with_its_overrides(preloaded_cli, tmp_path):
    done = preloaded_cli("export", "tiny_llama3", "trainer.max_steps=7", "--to", "mine.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("wrote mine.py: ")
    text = (tmp_path / "mine.py").read_text()
    assert "max_steps=7,  # command line\n" in text
    assert "Written by `recipes export tiny_llama3 trainer.max_steps=7` for NeMo" in " ".join(text.split())
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


@pytest.mark.nemo
@pytest.mark.parametrize(
    ("override", "says"),
    [("trainer.max_stepz=7", "no field 'max_stepz'"), ("trainer.strategy=None", "left no whole recipe")],
)
def test_export_refuses_overrides_that_leave_no_recipe(override, says, preloaded_cli, tmp_path):
    done = preloaded_cli("export", "tiny_llama3", override, "--to", "mine.py", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert says in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nemo
def test_diff_is_a_table_by_part_and_json_for_programs(preloaded_cli):
    text = preloaded_cli("diff", "tiny_llama3", "tiny_llama3_fp32").stdout
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "path A B why it matters"
    assert lines.index("trainer.strategy") < lines.index("trainer.plugins") < lines.index("optim")
    assert "precision 'bf16-mixed' '32' the number format of the training" in lines
    found = json.loads(preloaded_cli("diff", "tiny_llama3", "tiny_llama3_fp32", "--json").stdout)
    assert lines[-1] == f"{len(found)} differences; A is tiny_llama3, B is tiny_llama3_fp32; - is not set"
    same = preloaded_cli("diff", "tiny_llama3", "tiny_llama3")
    assert same.stdout == "tiny_llama3 and tiny_llama3 are the same recipe\n"
    assert same.returncode == 0


@pytest.mark.nemo
def test_diff_refuses_a_name_that_is_none(preloaded_cli):
    done = preloaded_cli("diff", "tiny_llama3", "nemo:llama3_9b")
    assert done.returncode == 2
    assert "NeMo has no recipe called 'llama3_9b'" in " ".join(done.stderr.split())
