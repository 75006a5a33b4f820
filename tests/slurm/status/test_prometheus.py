"""`status --prometheus`: the text format, read by Prometheus' own client, and written atomically."""

import os
from pathlib import Path

import pytest

from superpod.errors import UserError
from superpod.runtime.runs.run_folder import RunFolder
from superpod.runtime.runs.run_state import QueuedJob
from superpod.slurm.status import prometheus
from superpod.slurm.status.run_views import RunView, unreadable_view

parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client comes with NeMo's extras")


def view(path: Path, **values) -> RunView:
    run = RunFolder(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / "run.json").write_text('{"recipe": "tiny_llama3"}')
    return RunView(run, **{"state": "running", "user": "me", **values})


def samples(text: str) -> dict[tuple[str, str], float]:
    """By metric and run."""
    return {
        (sample.name, sample.labels["run"]): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
        if "state" not in sample.labels
    }


def test_samples_in_base_units(tmp_path):
    job = QueuedJob("7", "RUNNING", "None", "")
    one = view(
        *(tmp_path / "a",),
        step=40,
        max_steps=100,
        loss=2.5,
        tokens_per_s=1234.5,
        mfu=0.41,
        eta_s=90.0,
        checkpoint_step=30,
        checkpoint_age_s=60.0,
        attempts=2,
        jobs=[job],
    )
    values = samples(prometheus.render([one], now=1000.0))
    assert values == {
        ("superpod_run_step", "a"): 40,
        ("superpod_run_max_steps", "a"): 100,
        ("superpod_run_loss_nats", "a"): 2.5,
        ("superpod_run_tokens_per_second", "a"): 1234.5,
        ("superpod_run_mfu_ratio", "a"): 0.41,
        ("superpod_run_remaining_seconds", "a"): 90,
        ("superpod_run_checkpoint_step", "a"): 30,
        ("superpod_run_checkpoint_timestamp_seconds", "a"): 940,
        ("superpod_run_attempts", "a"): 2,
        ("superpod_run_jobs", "a"): 1,
        ("superpod_run_slow", "a"): 0,
    }


def test_one_series_per_state(tmp_path):
    families = list(parser.text_string_to_metric_families(prometheus.render([view(tmp_path / "a")])))
    (states,) = [family for family in families if family.name == "superpod_run_state"]
    assert {sample.labels["state"]: sample.value for sample in states.samples if sample.value} == {"running": 1}
    assert len(states.samples) == 9
    assert {family.type for family in families} == {"gauge"}
    assert all(family.documentation for family in families)


def test_unknown_values_have_no_sample(tmp_path):
    values = samples(prometheus.render([view(tmp_path / "a", jobs=None)]))
    assert ("superpod_run_loss_nats", "a") not in values
    assert ("superpod_run_jobs", "a") not in values
    (tmp_path / "b").mkdir()
    text = prometheus.render([unreadable_view(RunFolder(tmp_path / "b"), "torn")])
    assert samples(text) == {}
    assert 'state="unreadable"} 1' in text


def test_labels_are_escaped(tmp_path):
    name = 'a"b\\c\nd'
    values = samples(prometheus.render([view(tmp_path / name, step=3)]))
    assert values[("superpod_run_step", name)] == 3


def test_file_is_written_atomically(tmp_path):
    path = tmp_path / "runs.prom"
    prometheus.write(path, [view(tmp_path / "a")])
    assert os.stat(path).st_mode & 0o777 == 0o644
    before = path.read_text()
    torn = view(tmp_path / "b", step="x")
    torn.run.path.joinpath("run.json").unlink()
    with pytest.raises(ValueError, match="format"):
        prometheus.write(path, [torn])
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["runs.prom"]


@pytest.mark.parametrize(("name", "says"), [("runs.txt", "end in .prom"), ("none/runs.prom", "does not exist")])
def test_file_that_node_exporter_ignores_is_refused(tmp_path, name, says):
    with pytest.raises(UserError, match=says):
        prometheus.write(tmp_path / name, [])
