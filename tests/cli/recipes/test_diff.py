"""`recipes diff`."""

import json

import pytest


def test_a_missing_argument_is_refused(recipes_cli, tmp_path):
    done = recipes_cli("diff", "tiny_llama3", cwd=tmp_path, timeout=30)
    assert done.returncode == 2, done.stderr
    assert "Missing argument" in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("a", "says"),
    [
        ("gone.py", "gone.py does not exist"),
        ("no folder/gone.py", "no folder/gone.py does not exist"),
        ("torn.py", "torn.py:1: invalid Python"),
        ("empty.py", "empty.py has no function recipe()"),
        ("tiny_lama3", "there is no recipe 'tiny_lama3'"),
    ],
)
def test_an_invalid_file_or_name_is_refused_before_nemo_is_imported(a, says, refusal, tmp_path):
    (tmp_path / "torn.py").write_text("def (")
    (tmp_path / "empty.py").write_text("")
    assert says in refusal("diff", a, "tiny_llama3")


@pytest.mark.nemo
def test_a_file_is_compared_with_its_recipe(preloaded_cli, tmp_path):
    lines = ["from superpod.recipes import build", "def recipe():", "    mine = build('tiny_llama3')"]
    file = tmp_path / "it's mine.py"
    file.write_text("\n".join([*lines, "    mine.trainer.max_steps = 7", "    return mine", ""]))
    rows = json.loads(preloaded_cli("diff", file, "tiny_llama3", "--json").stdout)
    assert [(row["path"], row["a"]) for row in rows] == [("trainer.max_steps", "7")]


@pytest.mark.nemo
def test_diff_prints_a_table_by_part_and_json(preloaded_cli):
    text = preloaded_cli("diff", "tiny_llama3", "tiny_llama3_fp32").stdout
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "path A B why it matters"
    assert lines.index("trainer.strategy") < lines.index("trainer.plugins") < lines.index("optim")
    assert "precision 'bf16-mixed' '32' number format of the training" in lines
    differences = json.loads(preloaded_cli("diff", "tiny_llama3", "tiny_llama3_fp32", "--json").stdout)
    assert lines[-1] == f"{len(differences)} differences; A is tiny_llama3, B is tiny_llama3_fp32; - means not set"
    same = preloaded_cli("diff", "tiny_llama3", "tiny_llama3")
    assert same.stdout == "tiny_llama3 and tiny_llama3 are identical\n"
    assert same.returncode == 0


@pytest.mark.nemo
def test_diff_refuses_an_unknown_name(preloaded_cli):
    done = preloaded_cli("diff", "tiny_llama3", "nemo:llama3_9b")
    assert done.returncode == 2
    assert "NeMo has no recipe module 'llama3_9b'" in " ".join(done.stderr.split())
