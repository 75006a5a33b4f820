"""A run is resolved once: all consumers get the same values, and the cache key covers all inputs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from superpod.common import package_files
from superpod.requests import resolve
from superpod.requests.request import Request
from tests.requests import consumers


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of our sources that a test may edit."""
    for name, path in package_files.files([".", *resolve.SOURCES]).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, tmp_path / name)
    monkeypatch.setattr(package_files, "PACKAGE", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "file",
    [
        "requests/resolve.py",
        "nemo2/data_module.py",
        "included/recipes/layouts/tiny_llama3.toml",
        "planner/data/hardware.toml",
    ],
)
def test_edited_sources_change_the_key(package, file):
    before = resolve._cache_key(Request("tiny_llama3"))
    assert resolve._cache_key(Request("tiny_llama3")) == before
    with (package / file).open("a") as source:
        source.write("\n# edited\n")
    assert resolve._cache_key(Request("tiny_llama3")) != before


@pytest.mark.parametrize(
    "other",
    [
        Request("tiny_llama3", ("trainer.max_steps=7",)),
        Request("tiny_llama3", num_nodes=2),
        Request("tiny_llama3_lora"),
    ],
)
def test_other_request_changes_the_key(other):
    assert resolve._cache_key(other) != resolve._cache_key(Request("tiny_llama3"))


def test_edited_data_changes_the_key(tmp_path):
    (tmp_path / "dataset.json").write_text("{}")
    before = resolve._cache_key(Request("tiny_llama3", data=tmp_path))
    (tmp_path / "dataset.json").write_text('{"weights": [1]}')
    assert resolve._cache_key(Request("tiny_llama3", data=tmp_path)) != before


WANTED = {
    "with=fsdp": ("zero3", "8"),
    "trainer.strategy.tensor_model_parallel_size=8": (8, "1"),
    "data.global_batch_size=256": (256, None),
    "trainer.num_nodes=2": (512, None),
}
"""Of each planted override, the field of the layout that runs, and CUDA_DEVICE_MAX_CONNECTIONS of its ranks."""


@pytest.fixture(scope="module")
def views(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resolved")
    command = [sys.executable, "-W", "ignore", Path(consumers.__file__), folder / "cache", folder / "views.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "views.json").read_text())


@pytest.mark.nemo
@pytest.mark.slow
@pytest.mark.parametrize("override", consumers.PLANTED)
def test_all_consumers_see_a_planted_override(views, override):
    """Environment, preflight, plan.json, script, export and rehearsal agree on the layout that really runs."""
    view = views[override]
    value, connections = WANTED[override]
    layout = {key: view[key] for key in ("resolved", "plan.json", "preflight", "export", "rehearsal")}
    assert layout == dict.fromkeys(layout, value)
    assert (view["environment"], view["script"]) == (connections, connections)
    nodes = 2 if "num_nodes" in override else 1
    assert view["nodes"] == [nodes, nodes, True]


@pytest.mark.nemo
@pytest.mark.slow
@pytest.mark.parametrize("override", consumers.PLANTED)
def test_cache_returns_the_same_run(views, override):
    assert views[override]["cached"]


@pytest.mark.nemo
def test_truncated_cache_file_is_rebuilt(tmp_path, preloaded_cli):
    words = ("render", "tiny_llama3", "--cluster", "testbed")
    whole = preloaded_cli(*words, env={"XDG_CACHE_HOME": str(tmp_path)})
    assert whole.returncode == 0, whole.stderr
    (file,) = (tmp_path / "superpod" / "recipes").iterdir()
    file.write_bytes(file.read_bytes()[:100])
    rendered = preloaded_cli(*words, env={"XDG_CACHE_HOME": str(tmp_path)})
    assert (rendered.returncode, rendered.stdout) == (0, whole.stdout)
