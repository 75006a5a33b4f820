"""What a rehearsal switches off stands in a table, with the tests that show it otherwise; the page has the table."""

import ast
from pathlib import Path

import pytest

from superpod.rehearsal.comparison import switched_off
from superpod.rehearsal.patches import gpu_settings
from superpod.rehearsal.training import cpu_recipe

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "rehearsal.md"
BEGIN, END = "<!-- generated: python -m superpod.rehearsal.comparison.switched_off -->", "<!-- end of switched off -->"
TESTS = sorted({test for row in switched_off.ROWS for test in row.tests})


def replaced_by_name():
    """Fields that a patch replaces one by one: `_switch_off(config, "moe_token_dispatcher_type", "alltoall")`."""
    tree = ast.parse((ROOT / "src" / "superpod" / "rehearsal" / "patches" / "gpu_settings.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "_switch_off"]
    return {call.args[1].value for call in calls if isinstance(call.args[1], ast.Constant)}


def set_in(file, function):
    """Fields of a configuration that a function sets, by assignment or by `setattr` in a loop over their names."""
    tree = ast.parse((ROOT / "src" / "superpod" / "rehearsal" / file).read_text())
    (body,) = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function]
    targets = [t for node in ast.walk(body) if isinstance(node, ast.Assign) for t in node.targets]
    names = {t.attr for t in targets if isinstance(t, ast.Attribute) and ast.unparse(t.value) == "config"}
    for loop in (node for node in ast.walk(body) if isinstance(node, ast.For)):
        if "setattr(partial.model.config" in ast.unparse(loop):
            names |= set(ast.literal_eval(loop.iter))
    return names


def test_every_setting_that_is_switched_off_has_a_row():
    switched = {
        *gpu_settings.GPU_ONLY,
        *replaced_by_name(),
        *(path for path, _, _ in cpu_recipe._CPU_SETTINGS),
        *cpu_recipe._GPU_CALLBACKS,
        *set_in("proof/meta_build.py", "dry_build"),
    }
    rows = [name for row in switched_off.ROWS for name in row.settings]
    assert len(rows) == len(set(rows))
    assert switched - set(rows) == set(), "a setting is switched off and nothing says what shows it otherwise"
    assert set(rows) - switched <= {"hidden_dropout", "attention_dropout"}, "a row is of no setting"


@pytest.mark.parametrize("test", TESTS)
def test_what_a_row_names_is_there(test):
    file, _, name = test.partition("::")
    functions = [
        node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)
    ]
    assert name in functions


def test_the_page_has_the_table():
    held = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    assert held == switched_off.format_table(), "python -m superpod.rehearsal.comparison.switched_off"
