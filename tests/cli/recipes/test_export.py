"""`recipes export`."""

import pytest

from superpod.cli.recipes import export
from superpod.errors import UserError


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["export", "tiny_llama3", "--to", "torch.py"], "would shadow a module"),
        (["export", "tiny_llama3", "--to", "there.py"], "there.py already exists"),
        (["export", "tiny_llama3", "--to", "mine.txt"], "not the name of a Python module"),
        (["export", "tiny_lama3", "--to", "mine.py"], "there is no recipe 'tiny_lama3'"),
        (["export", "tiny_llama3", "max_steps", "--to", "mine.py"], "'max_steps' is not an override"),
        (["export", "tiny_llama3", "--nodes", "7", "--to", "mine.py"], "no legal layout of tiny_llama3 fits 7 nodes"),
        (["export", "tiny_llama3", "--data", "none", "--to", "mine.py"], "none"),
        (["export", "tiny_llama3"], "Missing option"),
    ],
)
def test_user_errors_are_refused_before_nemo_is_imported(words, says, recipes_cli, tmp_path):
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
    assert "\nMAX_STEPS = 7\n" in text
    assert "max_steps=MAX_STEPS,\n" in text
    assert "Written by `recipes export tiny_llama3 trainer.max_steps=7` for NeMo" in " ".join(text.split())
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


@pytest.mark.nemo
def test_export_to_bridge_writes_a_file_and_a_batch_script(preloaded_cli, tmp_path):
    name = "llama31_8b_lora_h100_bf16"
    done = preloaded_cli("export", name, "--to", "bridge", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}_bridge.py", f"{name}_bridge.sbatch"}
    assert f"\n    recipes export {name} --stack bridge\n" in (tmp_path / f"{name}_bridge.py").read_text()
    assert f" {name}_bridge.py\n" in (tmp_path / f"{name}_bridge.sbatch").read_text()
    assert "AutoBridge.import_ckpt" in done.stdout
    again = preloaded_cli("export", name, "--to", "bridge", cwd=tmp_path)
    assert again.returncode == 2
    assert "already exists" in again.stderr


@pytest.mark.nemo
def test_export_to_bridge_refuses_a_model_that_only_nemo_has(preloaded_cli, tmp_path):
    done = preloaded_cli("export", "mixtral_8x7b_pretrain_h100_bf16", "--to", "bridge", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "does not support MixtralForCausalLM" in done.stderr
    assert "docs/bridge.md" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nemo
@pytest.mark.parametrize(
    ("override", "says"),
    [("trainer.max_stepz=7", "no field 'max_stepz'"), ("trainer.strategy=None", "incomplete")],
)
def test_export_refuses_invalid_overrides(override, says, preloaded_cli, tmp_path):
    done = preloaded_cli("export", "tiny_llama3", override, "--to", "mine.py", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert says in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("torch.py", "would shadow a module"),
        ("json.py", "would shadow a module"),
        ("mine.txt", "not the name of a Python module"),
        ("my-recipe.py", "not the name of a Python module"),
        ("none/mine.py", "does not exist"),
        ("folder.py", "is a folder"),
    ],
)
def test_an_unsuitable_file_name_is_refused(name, says, tmp_path):
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(UserError, match=says):
        export.check_file(tmp_path / name)
