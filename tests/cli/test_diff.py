"""`recipes diff` as a user types it."""

import json

import pytest


def test_a_missing_recipe_is_reported_before_nemo_is_imported(recipes_cli, tmp_path):
    done = recipes_cli("diff", "tiny_llama3", cwd=tmp_path, timeout=30)
    assert done.returncode == 2, done.stderr
    assert "Missing argument" in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nemo
def test_diff_is_a_table_by_part_and_json_for_programs(preloaded_cli):
    text = preloaded_cli("diff", "tiny_llama3", "tiny_llama3_fp32").stdout
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "path A B why it matters"
    assert lines.index("trainer.strategy") < lines.index("trainer.plugins") < lines.index("optim")
    assert "precision 'bf16-mixed' '32' the number format of the training" in lines
    differences = json.loads(preloaded_cli("diff", "tiny_llama3", "tiny_llama3_fp32", "--json").stdout)
    assert lines[-1] == f"{len(differences)} differences; A is tiny_llama3, B is tiny_llama3_fp32; - is not set"
    same = preloaded_cli("diff", "tiny_llama3", "tiny_llama3")
    assert same.stdout == "tiny_llama3 and tiny_llama3 are the same recipe\n"
    assert same.returncode == 0


@pytest.mark.nemo
def test_diff_refuses_an_unknown_name(preloaded_cli):
    done = preloaded_cli("diff", "tiny_llama3", "nemo:llama3_9b")
    assert done.returncode == 2
    assert "NeMo has no recipe called 'llama3_9b'" in " ".join(done.stderr.split())
