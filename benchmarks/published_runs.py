"""Read the published runs to which the time model is fitted, with their model, source and class."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import unseen_runs
from accuracy_time import Result, is_scored, read

from superpod.planner.tables import published


def rows(reference: Path) -> list[Result]:
    """Return the rows of both tables, without rows of `unseen.csv` with an unspecified value."""
    results, _ = read(reference / "step_time.csv", predict=False)
    with (reference / "unseen.csv").open(newline="") as table:
        for row in csv.DictReader(table):
            if not row["open"]:
                job = published.job(row, unseen_runs.FACTS)
                seconds = unseen_runs.published_seconds(row, job)
                results.append(Result({**row, "held_out": "unseen", "notes": ""}, job, seconds, float("nan")))
    return [result for result in results if result.job]


def model(result: Result) -> str:
    """Return the model of a row; for a shape without a name, its source."""
    name = result.row["model"]
    return source(result) if name in ("", "gpt", "moe") else name


def source(result: Result) -> str:
    """Return the document of a row; for pages of NVIDIA's releases, the release, such as NeMo 26.04."""
    row = result.row
    if "verification card" in row["release"]:
        return "verification cards"
    if row["release"].startswith("MLPerf"):
        return "MLPerf"
    document = re.split(r"[@,; ]", row["source"])[0]
    if document.startswith(("NVIDIA/dgxc-benchmarking", "NVIDIA-NeMo/Automodel")):
        return document.split(":")[0]
    release = re.match(r"NeMo \d\d\.\d\d", row["release"])
    return release[0] if release else document


def kind(result: Result) -> str:
    """Return the class in which a row is scored; "" = it is not scored."""
    if result.row["release"] == "vTrain" or not is_scored(result.row):
        return ""
    assert result.job
    if result.row["held_out"] == "unseen" or result.job.options.framework != "megatron":
        return "other software"
    if result.job.task != "pretrain":
        return "fine-tuning"
    return "experts" if result.job.model.is_moe else "dense"
