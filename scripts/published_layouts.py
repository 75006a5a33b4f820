"""Read published runs of our recipes from a table of measurements, and write recipes/published.toml."""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from layout_cases import Case, cases
from superpod.collection import registry
from superpod.errors import UserError
from superpod.planner.formats import option_syntax
from superpod.planner.layout import Layout
from superpod.planner.tables import published

FILE = registry.LAYOUTS.parent / "published.toml"


@dataclass(frozen=True)
class PublishedRun:
    """A published run of one of our recipes."""

    case: Case
    gpus: int
    layout: Layout
    tokens_per_s_per_gpu: float
    release: str
    source: str

    def line(self) -> str:
        """Format the run as an item of its recipe's list in recipes/published.toml."""
        return (
            f"    {{ gpus = {self.gpus}, tokens_per_s_per_gpu = {round(self.tokens_per_s_per_gpu, 1)}, "
            f'layout = "{option_syntax.format_layout(self.layout, with_batch=True)}", '
            f'release = "{self.release}", source = "{self.source}" }},\n'
        )


Runs = dict[tuple[str, int], PublishedRun]
"""(recipe name without its model, GPUs) -> its fastest published run."""


def read(path: Path) -> dict[str, Runs]:
    """Return model -> the fastest published run of each of its cases and sizes in a CSV file."""
    by_model: dict[str, Runs] = defaultdict(dict)
    with path.open() as table:
        for run in map(_parse_run, csv.DictReader(table)):
            if run is None:
                continue
            known = by_model[run.case.model].get((run.case.suffix, run.gpus))
            if known is None or run.tokens_per_s_per_gpu > known.tokens_per_s_per_gpu:
                by_model[run.case.model][run.case.suffix, run.gpus] = run
    return by_model


def _parse_run(row: dict[str, str]) -> PublishedRun | None:
    """Return the run of a row; None if no recipe has its model, task, GPU, precision and sequence length."""
    model = registry.models().get(row["model"])
    if model is None or row["layers"] or row["fsdp"] not in ("", "0", "1"):
        return None
    try:
        job = published.job(row)
    except UserError:
        return None
    case = Case(row["model"], job.task, 0, job.node.gpu.name, job.precision)
    if case not in _cases(row["model"]) or case.seq != job.seq or job.options.framework != "megatron":
        return None
    if job.gpus % 8 or job.layout.sharding in ("zero2", "zero3"):
        return None
    layout = replace(job.layout, sharding=case.sharding, etp=job.layout.etp if job.model.is_moe else None)
    speed = row["tokens_per_s_per_gpu"] or job.tokens / float(row["step_time_s"] or 1e9) / job.gpus
    return PublishedRun(case, job.gpus, layout, float(speed), row["release"] or "measured", row["source"])


@cache
def _cases(model: str) -> frozenset[Case]:
    """Return the cases of a model that have a recipe."""
    return frozenset(case for group in cases(model) for case in group)


def write(by_model: dict[str, Runs]) -> None:
    """Write recipes/published.toml."""
    lines: dict[str, list[str]] = defaultdict(list)
    for model, runs in sorted(by_model.items()):
        for (suffix, _), run in sorted(runs.items()):
            lines[f"{model}_{suffix}"].append(run.line())
    text = "# The fastest published measurement of each recipe at each size. Written by scripts/plan_layouts.py.\n"
    for name, items in lines.items():
        text += f"{name} = [\n{''.join(items)}]\n"
    FILE.write_text(text)
