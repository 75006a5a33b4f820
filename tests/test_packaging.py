"""Installation as a wheel, also next to other packages called `recipes`."""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests import source_rules
from tests.conftest import ROOT

DECOY = "raise SystemExit('a decoy called recipes was imported')\n"


def run(*command, cwd, **more):
    return subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, timeout=300, **more)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder, tree = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("tree")
    listed = run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT)
    if listed.returncode:
        pytest.skip("not a git checkout: which files belong to the project is not known")
    for name in filter(lambda name: (ROOT / name).exists(), listed.stdout.splitlines()):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
    (tree / source_rules.PACKAGE / "collection" / "facts" / "proven.json").touch()  # `recipes prove --write` makes it
    command = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, tree)
    done = run(*command, cwd=folder)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Create an environment with the wheel, its base dependencies, and another package called `recipes`."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=True)
    done = run(folder / "bin" / "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel, cwd=folder)
    if "Could not find a version" in done.stderr or "Connection" in done.stderr:
        pytest.skip(f"no package registry in reach: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    site = next(folder.glob("lib/python*/site-packages"))
    assert not (site / "torch").exists()
    (site / "recipes").mkdir()
    (site / "recipes" / "__init__.py").write_text(DECOY)
    return folder / "bin" / "python"


def test_the_wheel_contains_the_package_and_its_data(wheel):
    import zipfile

    names = zipfile.ZipFile(wheel).namelist()
    assert "superpod/included/recipes/layouts/llama3_8b.toml" in names
    assert "superpod/cli/__init__.py" in names
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"superpod"}
    assert not [name for name in names if "/tests/" in name]


def test_the_wheel_contains_every_data_file(wheel):
    import zipfile

    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = run("git", "ls-files", cwd=ROOT / source_rules.PACKAGE).stdout.splitlines()
    data = {name for name in tracked if not name.endswith(".py")}
    data |= {f"included/{name}" for name in run("git", "ls-files", "recipes", "slurm", cwd=ROOT).stdout.splitlines()}
    data |= {"collection/facts/proven.json", "collection/facts/ran_on_gpu.toml"}
    assert len(data) > 50
    assert {f"superpod/{name}" for name in data} - names == set()


@pytest.mark.slow
def test_recipes_are_listed_next_to_another_recipes_package(installed, tmp_path):
    done = run(installed, "-m", "superpod.cli", "list", "llama31_405b", "pretrain", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "llama31_405b_pretrain_h100_bf16" in done.stdout


def test_building_without_nemo_is_refused_with_the_install_command(installed, tmp_path):
    done = run(installed, "-m", "superpod.cli", "show", "tiny_llama3", cwd=tmp_path)
    assert done.returncode == 2
    assert "needs NeMo" in done.stderr
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_recipes_folder_in_the_working_directory_is_not_imported(tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "__init__.py").write_text(DECOY)
    code = "import superpod.collection.registry as r; print(len(r.recipes()))"
    done = run(sys.executable, "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5


def test_pyright_resolves_the_package(tmp_path):
    """Pyright must resolve the import and find the type error."""
    file = tmp_path / "uses.py"
    file.write_text("from superpod.planner.layout import Layout\n\nLayout().short() + 1\n")
    done = run(Path(sys.executable).parent / "pyright", "-p", ROOT, file, cwd=ROOT)
    if "error: " not in done.stdout and done.returncode not in (0, 1):
        pytest.skip(f"pyright cannot start here: {done.stderr.strip()[:200]}")
    assert 'Operator "+" not supported' in done.stdout, done.stdout
    assert "could not be resolved" not in done.stdout
