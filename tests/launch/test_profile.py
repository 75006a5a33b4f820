"""A real rehearsal with `--profile torch`, and what `profile show` reads from its trace."""

import json

import pytest

from superpod.runtime.runs.run_folder import RunFolder

pytestmark = [pytest.mark.nemo, pytest.mark.train, pytest.mark.slow, pytest.mark.timeout(4000)]

ONE = (
    "trainer.devices=1",
    "trainer.strategy.tensor_model_parallel_size=1",
    "trainer.strategy.sequence_parallel=False",
    "data.global_batch_size=4",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory, recipes_cli):
    """Six steps, of which the third and the fourth are profiled; then two more, of which the last is."""
    place = tmp_path_factory.mktemp("profile")
    words = ["tiny_llama3", "--profile", "torch", "--profile-steps"]
    done = recipes_cli("run", *words, "3-4", *ONE, "trainer.max_steps=6", cwd=place, timeout=1800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    folder = RunFolder.latest(place / "runs", "tiny_llama3")
    assert folder
    assert f"profile: recipes profile show {folder.path}" in done.stdout
    return folder


def shown(recipes_cli, run):
    done = recipes_cli("profile", "show", run.path, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_classes_of_a_real_trace_add_up_to_its_steps(recipes_cli, run):
    summary = shown(recipes_cli, run)
    sums = summary["sums"]
    assert (summary["tool"], summary["on_gpu"], summary["rank"], sums["steps"]) == ("torch", False, 0, 2)
    assert sum(sums["classes"].values()) == pytest.approx(sums["seconds"], rel=0.01)
    times = {line["step"]: line["step_time_s"] for line in run.metrics()}
    assert sums["seconds"] == pytest.approx(times[3] + times[4], rel=0.25)  # the callback's clock, in the same steps
    for kind in ("products", "attention", "norms", "optimizer", "elementwise"):
        assert 0 < sums["classes"][kind] < sums["seconds"], kind
    rows = summary["planned"]["rows"]
    assert sum(row["measured_s"] for row in rows) == pytest.approx(sums["seconds"] / 2, rel=1e-6)
    (layout,) = json.loads((run.path / "plan.json").read_text())["layouts"]
    assert sum(row["planned_s"] for row in rows) == pytest.approx(layout["step_time_s"], rel=1e-6)
    assert (summary["bounds"], summary["changes"]) == ([], [])
    assert any("CPUs" in note for note in summary["notes"])


def test_only_requested_steps_and_ranks_are_written(run):
    folders = sorted(path.name for path in (run.path / "profile").iterdir())
    assert folders == ["rank-0"]


def test_resumed_run_may_be_profiled_again(recipes_cli, run):
    words = ["tiny_llama3", "--resume", run.path, "--profile", "torch", "--profile-steps", "8"]
    done = recipes_cli("run", *words, "trainer.max_steps=8", timeout=1800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert shown(recipes_cli, run)["sums"]["steps"] == 1
    assert run.facts["profile"] == "torch:8-8:0"
