"""Build 5: rehearsals of an edited export, of NeMo's own recipe, and of dropout 0.1."""

import json

import pytest


def rehearsed(cli, *words):
    done = cli("rehearse", *words, "--steps", 4, "--json", timeout=580)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    facts = json.loads(done.stdout)
    assert facts["passed"]
    return facts


@pytest.mark.nemo
@pytest.mark.train
@pytest.mark.long
def test_build_5_dropout_is_rehearsed_in_a_run_of_its_own(recipes_cli):
    overrides = ("model.config.hidden_dropout=0.1", "model.config.attention_dropout=0.1")
    facts = rehearsed(recipes_cli, "tiny_llama3", *overrides)
    assert facts["dropouts"] == {"model.config.hidden_dropout": 0.1, "model.config.attention_dropout": 0.1}
    assert facts["losses"]["dropout"] != facts["losses"]["own"]
    names = {check["name"] for check in facts["checks"]}
    assert {"dropout is noise", "loss falls, with dropout", "every rank took part, with dropout"} <= names


@pytest.mark.nemo
@pytest.mark.train
@pytest.mark.long
def test_build_5_an_edited_export_is_rehearsed(recipes_cli, tmp_path):
    path = tmp_path / "my edited recipe.py"
    assert recipes_cli("export", "tiny_llama3", "--to", tmp_path / "mine.py").returncode == 0
    text = (tmp_path / "mine.py").read_text()
    path.write_text(text.replace("num_layers=4", "num_layers=6"))
    facts = rehearsed(recipes_cli, path)
    assert facts["shrunk"]["layers"][0] == 6
    assert facts["recipe"] == str(path)


@pytest.mark.nemo
@pytest.mark.train
@pytest.mark.slow
def test_build_5_nemos_own_recipe_is_rehearsed(recipes_cli):
    facts = rehearsed(recipes_cli, "nemo:llama32_1b")
    assert facts["shrunk"]["layers"] == [16, 2]


@pytest.mark.nemo
@pytest.mark.slow
@pytest.mark.parametrize("code", [0, *(pytest.param(code, marks=pytest.mark.long) for code in (2, 5))])
def test_a_file_that_ends_the_process_is_no_passed_rehearsal(recipes_cli, tmp_path, code):
    path = tmp_path / "gone.py"
    path.write_text(f"import os\n\n\ndef recipe():\n    os._exit({code})\n")
    done = recipes_cli("rehearse", path, timeout=300, env={"SUPERPOD_REHEARSAL_ENDED": str(tmp_path / "mine")})
    assert done.returncode == 2
    assert f"exited with code {code}" in done.stderr


def test_a_file_that_hangs_is_ended(tmp_path, monkeypatch):
    from superpod.cli.running import rehearse
    from superpod.errors import UserError

    path = tmp_path / "hangs.py"
    path.write_text("def recipe():\n    while True:\n        pass\n")
    monkeypatch.setattr(rehearse, "LIMIT_S", 1)
    monkeypatch.setattr("sys.argv", ["recipes", "rehearse", str(path)])
    with pytest.raises(UserError, match="within 1 s"):
        rehearse._rehearse_in_child(str(path))


@pytest.mark.parametrize("override", ["log.ckpt.save_top_k=0", "log.ckpt.every_n_train_steps=0"])
def test_a_checkpoint_override_that_is_wrong_by_itself_is_refused(recipes_cli, override):
    done = recipes_cli("rehearse", "tiny_llama3", override)
    assert done.returncode == 2
    assert "is 0" in done.stderr
