"""Published runs of papers and other software: read as their sources count, and large errors have a cause."""

import csv

import pytest

from superpod.planner.tables import published
from tests.planner.accuracy.test_accuracy import REFERENCE, load

UNSEEN = REFERENCE / "unseen.csv"
FIGURES = ("step_time_s", "tokens_per_s_per_gpu", "tflops")


@pytest.fixture(scope="module")
def unseen_runs():
    return load("unseen_runs")


@pytest.fixture(scope="module")
def runs(unseen_runs):
    return unseen_runs.read(UNSEEN)


def table(name):
    with (REFERENCE / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_row_has_a_source_and_one_figure_and_leaves_open_what_is_blank():
    rows = table("unseen")
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        assert row["source"]
        assert sum(bool(row[figure]) for figure in FIGURES) == 1
        assert bool(row["tflops"]) == bool(row["counted"])
        assert all(key in ("mbs", "vp") and not row[key] for key in row["open"].split())
        assert row["mbs"] or "mbs" in row["open"]


@pytest.mark.slow
def test_no_layout_of_a_row_stands_in_the_tables_that_were_fitted(unseen_runs, runs):
    fitted = set()
    for name in ("step_time", "memory", "nanotron"):
        for row in table(name):
            try:
                fitted.add(identity(published.job(row, unseen_runs.FACTS)))
            except (published.Unsupported, published.InconsistentRow):
                continue
    assert len(fitted) > 1000
    assert [run.row["id"] for run in runs if identity(run.job) in fitted] == []


def identity(job):
    """What makes two runs one layout: all but the number of GPUs, the batch and the kind of FP8."""
    x = job.layout
    model = job.model.replace(name="", vocab_divisible_by=128)
    degrees = (x.tp, x.pp, x.vp, x.cp, x.ep, x.mbs, x.sharding == "zero3")
    return model, job.node.gpu.name, job.precision[:3], job.seq, job.task, degrees


@pytest.mark.parametrize(
    ("place", "gpus", "tflops", "counted"),
    [
        ("ModelZoo", "256", 245, "causal"),  # Qwen3 235B on H100: 19.7 s and 245 TFLOP/s stand in one row
        ("arXiv:2402.15627 table 2", "256", 0.53 * 312, "full"),  # MegaScale's Megatron-LM: 40.0 s and 53.0 % MFU
        ("arXiv:2402.15627 table 2", "12288", 0.412 * 312, "full"),  # 8.57 s and 41.2 %
        ("README_175b", "128", 0.5354 * 989, "full"),  # 8.309 s and 53.54 %
    ],
)
def test_flops_are_counted_as_the_source_counts_them(unseen_runs, runs, place, gpus, tflops, counted):
    run = next(run for run in runs if place in run.row["source"] and run.row["gpus"] == gpus)
    printed = float(run.row["step_time_s"])
    row = {**run.row, "step_time_s": "", "tflops": str(tflops), "counted": counted}
    assert unseen_runs.published_seconds(row, run.job) == pytest.approx(printed, rel=0.03)


def test_a_large_error_without_a_cause_fails(unseen_runs, tmp_path, capsys):
    rows = [row for row in table("unseen") if "llama3.1/README_405b" in row["source"]]
    slow = {**rows[0], "id": "slow", "step_time_s": "1", "why": ""}
    assert write(tmp_path / "unseen.csv", [slow])
    assert unseen_runs.main(tmp_path) == 1
    assert "`why` is empty: slow" in capsys.readouterr().out


def write(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path
