"""A run is resolved once: every consumer gets the same layout, environment, plan and file; the cache sees changes."""

import shutil

import pytest

from superpod.lifecycle import resolve
from superpod.lifecycle.request import Request
from superpod.slurm import environment, preflight, profiles, submit
from superpod.slurm.live_cluster import LiveCluster

DP_ONLY = "llama3_8b_pretrain_h100_bf16"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A copy of our sources that a test may edit."""
    for name in resolve.SOURCES:
        shutil.copytree(resolve.PACKAGE / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(resolve, "PACKAGE", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "file",
    [
        "lifecycle/resolve.py",
        "recipes/data/module.py",
        "recipes/layouts/tiny_llama3.toml",
        "planner/data/hardware.toml",
    ],
)
def test_an_edit_of_what_decides_a_run_is_another_key(package, file):
    before = resolve._key(Request("tiny_llama3"))
    assert resolve._key(Request("tiny_llama3")) == before
    with (package / file).open("a") as source:
        source.write("\n# edited\n")
    assert resolve._key(Request("tiny_llama3")) != before


@pytest.mark.parametrize(
    "other",
    [
        Request("tiny_llama3", ("trainer.max_steps=7",)),
        Request("tiny_llama3", num_nodes=2),
        Request("tiny_llama3_lora"),
    ],
)
def test_another_request_is_another_key(other):
    assert resolve._key(other) != resolve._key(Request("tiny_llama3"))


def test_edited_data_is_another_key(tmp_path):
    (tmp_path / "dataset.json").write_text("{}")
    before = resolve._key(Request("tiny_llama3", data=tmp_path))
    (tmp_path / "dataset.json").write_text('{"weights": [1]}')
    assert resolve._key(Request("tiny_llama3", data=tmp_path)) != before


PLANTED = {
    "with=fsdp": ("sharding", "zero3", "8"),
    "trainer.strategy.tensor_model_parallel_size=2": ("tp", 2, "1"),
}
"""An override, the field of the layout that it changes, and the CUDA_DEVICE_MAX_CONNECTIONS that this needs."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Each planted override resolved, from NeMo and from the cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        requests = {text: Request(DP_ONLY, (text,)) for text in PLANTED}
        built = {text: resolve.resolve(request) for text, request in requests.items()}
        fresh = {text: resolve.resolved(request) for text, request in requests.items()}
        assert all(map(resolve.is_cached, requests.values()))
        cached = {text: resolve.resolved(request) for text, request in requests.items()}
    return built, fresh, cached


@pytest.mark.nemo
@pytest.mark.parametrize("override", PLANTED)
def test_all_consumers_see_a_planted_override(runs, override):
    """Environment, preflight, plan.json, script, export and rehearsal agree on the layout that really runs."""
    from superpod import rehearsal
    from superpod.recipes.layout import layout_of

    built, _, cached = (part[override] for part in runs)
    field, value, connections = PLANTED[override]
    cluster = profiles.load("dgx_h100")
    assert getattr(cached.layout, field) == value
    variables = {v.name: v.value for v in environment.variables(cluster, cached.layout, cached.job.precision)}
    assert variables["CUDA_DEVICE_MAX_CONNECTIONS"] == connections
    assert cached.plan["layouts"][0]["layout"][field] == value
    submission = submit.Submission(cached, cluster)
    assert f"export CUDA_DEVICE_MAX_CONNECTIONS={connections} " in submit.script(submission)
    assert getattr(preflight.Case(submission, LiveCluster()).run.job.layout, field) == value
    names: dict = {}
    exec(compile(cached.source, "recipe.py", "exec"), names)
    assert getattr(layout_of(names["recipe"]()), field) == value
    rehearsed, _ = rehearsal.rehearse(built.partial, devices=8)
    assert layout_of(rehearsed).tp == cached.layout.tp


@pytest.mark.nemo
@pytest.mark.parametrize("override", PLANTED)
def test_the_cache_gives_back_what_was_put_in(runs, override):
    built, fresh, cached = (part[override] for part in runs)
    assert fresh == cached
    assert built.job == cached.job
    assert (built.plan, built.lines, built.max_steps) == (cached.plan, cached.lines, cached.max_steps)


@pytest.mark.nemo
def test_a_torn_file_in_the_cache_is_built_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    request = Request("tiny_llama3")
    whole = resolve.resolved(request)
    (file,) = resolve.cache().iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert resolve.resolved(request) == whole
