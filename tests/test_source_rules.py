"""The source tree follows its rules, and each rule finds a planted violation."""

import importlib.util
import re
import shutil
from typing import Any

import pytest
from typer.main import get_command

from superpod.cli.app import app
from superpod.collection.declarations import ORDER
from superpod.planner import hardware
from tests import source_rules
from tests.conftest import ROOT

spec = importlib.util.spec_from_file_location("figures", ROOT / "scripts" / "figures.py")
assert spec is not None
assert spec.loader is not None
figures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(figures)

PACKAGE = ROOT / source_rules.PACKAGE
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_imports_go_one_way():
    assert source_rules.wrong_way_imports(PACKAGE) == []


def test_no_module_imports_itself_through_others(tmp_path):
    assert source_rules.import_cycle(PACKAGE) == []
    (tmp_path / "first.py").write_text("def use():\n    from superpod" + " import second\n")
    (tmp_path / "second.py").write_text("from superpod" + ".first import use\n")
    assert len(source_rules.import_cycle(tmp_path)) == 3
    (tmp_path / "second.py").write_text("if TYPE_CHECKING:\n    from superpod" + ".first import use\n")
    assert source_rules.import_cycle(tmp_path) == []


def test_commands_in_strings_import_modules_that_exist(tmp_path):
    assert source_rules.missing_imports(ROOT) == []
    planted = tmp_path / "tests" / "test_bad.py"
    planted.parent.mkdir()
    planted.write_text("COMMAND = 'from superpod" + ".gone import orphans'\n")
    assert source_rules.missing_imports(tmp_path) == ["tests/test_bad.py:1 imports superpod.gone.orphans"]


def test_recipe_code_is_not_repeated():
    assert source_rules.copies(PACKAGE / "nemo2") == []


def test_every_model_is_registered():
    assert source_rules.unregistered(ROOT / "recipes", ORDER) == []


def test_files_and_functions_are_short():
    assert source_rules.long_files(ROOT) == []


def test_no_code_compares_names_of_gpus():
    facts = hardware.builtin()
    assert source_rules.compared_names(PACKAGE, {*facts.gpus, *facts.nodes, *facts.generations}) == []


@pytest.mark.parametrize(
    ("where", "text", "says"),
    [
        ("planner/bad.py", "import torch\n", "planner/bad.py:1 imports torch"),
        (
            "planner/bad.py",
            "from superpod.collection import registry\n",
            "planner/bad.py:1 imports superpod.collection",
        ),
        ("nemo2/bad.py", "def f():\n    import superpod.launch.local\n", "nemo2/bad.py:2 imports superpod.launch"),
        ("launch/bad.py", "from nemo import lightning\n", "launch/bad.py:1 imports nemo"),
        ("launch/bad.py", "from nemo2 import overrides\n", "launch/bad.py:1 imports nemo2: write superpod"),
    ],
)
def test_a_wrong_way_import_is_found(tmp_path, where, text, says):
    file = tmp_path / where
    file.parent.mkdir()
    file.write_text(text)
    assert any(broken.startswith(says) for broken in source_rules.wrong_way_imports(tmp_path))


def test_a_copy_of_six_lines_is_found(tmp_path):
    lines = (PACKAGE / "nemo2" / "build" / "resilience.py").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if "strategy.ckpt_async_save" in line)
    shutil.copy(PACKAGE / "nemo2" / "build" / "resilience.py", tmp_path)
    (tmp_path / "copy.py").write_text("\n".join(lines[start : start + 10]))
    assert source_rules.copies(tmp_path)
    (tmp_path / "copy.py").write_text("\n".join(lines[start : start + 4]))
    assert not source_rules.copies(tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        (
            "models/llama.py",
            "@model()\ndef llama9():\n    '''Llama 9.'''\n",
            "llama9 of llama.py has no layouts/llama9.toml",
        ),
        ("layouts/llama9.toml", "", "layouts/llama9.toml has no model"),
        ("models/new.py", "@model()\ndef llama3_8b():\n    '''Again.'''\n", "llama3_8b is in llama.py and new.py"),
    ],
)
def test_an_unregistered_recipe_is_found(tmp_path, file, text, says):
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    (tmp_path / "recipes" / file).write_text(text)
    assert says in source_rules.unregistered(tmp_path / "recipes", ORDER)


def test_a_family_without_a_file_is_found():
    assert source_rules.unregistered(ROOT / "recipes", ("llama", "llama9")) == [
        "ORDER names llama9, but llama9.py does not exist"
    ]


def test_a_gpu_in_a_comparison_is_found(tmp_path):
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "a.py").write_text("def f(gpu):\n    return gpu in ('x100', 'h100')\n")
    assert source_rules.compared_names(tmp_path, {"h100"}) == ["slurm/a.py:2 compares with h100"]


def test_a_long_function_is_found(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "long.py").write_text("def f():\n" + "    x = 1\n" * 80)
    assert source_rules.long_files(tmp_path) == ["scripts/long.py: f has 81 lines"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_documented_commands_exist(page):
    """Every verb and option on a page exists."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line, (program, *words) in source_rules.commands(page):
        if program == "make":
            assert words[0] in targets, f"{page.name}:{line}"
            continue
        while words[:1] == ["--recipes"]:
            words = words[2:]
        command: Any = get_command(app)
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        assert not getattr(command, "commands", {}), f"{page.name}:{line}: no verb {words[:1]}"
        known = {flag for parameter in command.params for flag in parameter.opts} | {"--help"}
        assert {w.partition("=")[0] for w in words if w.startswith("--")} <= known, f"{page.name}:{line}"


def test_the_pages_contain_commands():
    assert sum(len(source_rules.commands(page)) for page in PAGES) > 10


@pytest.mark.parametrize("name", figures.COMMANDS)
def test_the_readme_shows_what_the_command_prints(name):
    text = (ROOT / "README.md").read_text()
    assert figures.filled(text, name, figures.COMMANDS[name]) == text, "make figures"


def test_the_readme_is_one_page():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) < 900


def test_goldens_are_short():
    """Goldens must be short enough to review in a diff."""
    folder = ROOT / "tests" / "goldens" / "recipes"
    assert sum(path.read_text().count("\n") for path in folder.rglob("*.txt")) < 8_000
