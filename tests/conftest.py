import contextlib
import difflib
import importlib.util
import itertools
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from superpod.runtime.runs.run_folder import RunFolder
from tests.preloaded import Server

ROOT = Path(__file__).parent.parent
MOST_SHOWN = 100
"""Largest number of lines of a golden's diff to print."""

if not shutil.which("nvidia-smi"):  # as recipes.build does, for the tests that import NeMo by themselves
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.devnull)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what it puts in the background without it


def pytest_addoption(parser):
    parser.addoption("--update-goldens", action="store_true", help="write the goldens anew instead of comparing")


def pytest_collection_modifyitems(items):
    if "PYTEST_XDIST_WORKER" in os.environ:
        _order_for_workers(items)
    if importlib.util.find_spec("nemo") is not None:
        return
    for item in items:
        if item.get_closest_marker("nemo") or item.get_closest_marker("train"):
            item.add_marker(
                pytest.mark.skip(reason="NeMo is not installed: pip install -c constraints.txt -e '.[nemo]'")
            )


TOGETHER = ("tests/rehearsal", "tests/nemo2", "tests/slurm/testbed", "tests/extending")
"""Folders whose files share costly fixtures and run on the same worker."""


def _together(file):
    folder = file.rpartition("/")[0]
    return folder if folder in TOGETHER else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Schedule tests that share fixtures on one worker. xdist 3.8's groups do not work with pytest 9.2 (`_nodeid`)."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFixtures(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return _together(nodeid.partition("::")[0])

    return ByFixtures(config, log)


def _order_for_workers(items):
    """Sort slow tests first, and before them those of Slurm, which mostly wait."""
    order = {}
    for item in items:
        group = _together(item.nodeid.partition("::")[0])
        place = next((i for i, name in enumerate(("slurm", "train", "slow")) if item.get_closest_marker(name)), 3)
        order[group] = min(place, order.get(group, place))
    items.sort(key=lambda item: order[_together(item.nodeid.partition("::")[0])])


@pytest.fixture
def golden(request):
    """Compare a text with tests/goldens/NAME, or with a path; with --update-goldens, write it there."""

    def compare(name: str | Path, text: str) -> None:
        path = ROOT / "tests" / "goldens" / name
        if request.config.getoption("--update-goldens"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.is_file(), f"no golden {path}: `make goldens` writes it"
        if (stored := path.read_text()) != text:
            changed = difflib.unified_diff(stored.splitlines(), text.splitlines(), "stored", "now", lineterm="", n=1)
            shown = "\n".join(line[:300] for line in itertools.islice(changed, MOST_SHOWN))
            pytest.fail(f"{path.relative_to(ROOT)} differs; `make goldens` writes it:\n{shown}", pytrace=False)

    return compare


def environment_of(env):
    return {**os.environ, "COLUMNS": "120", "NO_COLOR": "1", **(env or {})}


@pytest.fixture(scope="session")
def recipes_cli():
    """Run the command; returns the finished process with text output.

    It runs in a fork of a process that has imported the light modules; with options or variables that Python reads at
    its start, in a process of its own.
    """
    server = Server("light", environment_of(None))

    def call(*args, cwd=None, env=None, timeout=120, python=()):
        environ = environment_of(env)
        if python or any(key.startswith(("PYTHON", "LC_", "LANG")) for key in env or {}):
            command = [sys.executable, *python, "-m", "superpod.cli", *map(str, args)]
            return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=timeout)
        return server.call([*map(str, args)], cwd, environ, timeout)

    yield call
    server.close()


@pytest.fixture(scope="session")
def preloaded_cli():
    """Run the command in a fork of a process that has already imported NeMo, to save time."""
    server = Server("nemo", environment_of(None))

    def call(*args, cwd=None, env=None, timeout=120):
        return server.call([*map(str, args)], cwd, environment_of(env), timeout)

    yield call
    server.close()


NAME = "tiny_pretrain_h100_bf16"


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "runs", NAME, facts={"seed": 7}, recipe_lines=["a = 1", "b = 2"])


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of 512 KiB."""
    if os.geteuid():
        pytest.skip("mounting a small tmpfs needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", disk], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no small tmpfs: {made.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill(disk: Path, name: str = "filler") -> None:
    with contextlib.suppress(OSError), open(disk / name, "ab", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass


@pytest.fixture(scope="session")
def nemo() -> None:
    """Import NeMo without its warnings, or skip the test if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("nemo.collections.llm", reason="the [nemo] extra is not installed")
