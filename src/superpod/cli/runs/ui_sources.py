"""Data for the page of `recipes ui`: plans for the values of its input fields, and the runs in one folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.cli.options import plan_options
from superpod.cli.options.plan_options import PlanOptions
from superpod.cli.planning import plan
from superpod.errors import UserError, cut, readable
from superpod.reports.runs import live_run, run_list
from superpod.reports.runs.followed_run import FollowedRun, extract_curve
from superpod.runtime.runs.run_state import State
from superpod.slurm.status import polling
from superpod.slurm.submission.connection import Connection

if TYPE_CHECKING:
    from superpod.reports.runs.run_list import ListedRun
    from superpod.slurm.status.run_views import RunView

AUTO = "auto"
DEFAULTS = {
    "model": "llama3_8b", "gpu": "h100", "gpus": "64", "seq": str(plan_options.SEQ), "gbs": str(plan_options.GBS),
    "precision": "bf16",
}  # fmt: skip
CACHE_S = 1.0
"""Seconds for which the state of the runs is cached, for all browser windows."""
CURVES = {"loss": "loss", "rate": "tokens_per_s_per_gpu"}
FIELDS = ("state", "step", "max_steps", "loss", "tokens_per_s", "mfu", "eta_s", "attempt", "user")


def page(folder: Path) -> str:
    """Return the HTML page; `folder` contains the run folders."""
    from superpod.pages.ui import page as ui_page
    from superpod.planner import hardware, models

    facts = hardware.builtin()
    known_precisions = sorted(
        {name for gpu in facts.gpus.values() for name in gpu.precisions if name not in ("fp16", "tf32")}
    )
    return ui_page.render_ui(
        models=models.names(),
        gpus=[*dict.fromkeys(facts.nodes)],
        precisions=[*sorted(known_precisions, key=lambda name: (name != "bf16", name)), AUTO],
        defaults=DEFAULTS,
        folder=readable(str(folder)),
    )


def options(parameters: Mapping[str, str]) -> PlanOptions:
    """Return the planning options for the values of the page's input fields: model, gpu, gpus, seq, gbs, precision.

    Raises:
        UserError: the model is a path, or a number is invalid.
    """
    from superpod.collection.facts import names

    name = parameters.get("model", "")
    if name.endswith(".json") or name.startswith(("~", ".", "/")) or _exists(name):
        raise UserError(f"{cut(name)} is a path, not a model name", "use `recipes plan` for a config.json")
    return PlanOptions(
        names.translate(name),
        gpu=parameters.get("gpu") or None,
        gpus=_integer_option(parameters, "gpus", "--gpus"),
        seq=_integer_option(parameters, "seq", "--seq"),
        gbs=_integer_option(parameters, "gbs", "--gbs"),
        precision=parameters.get("precision") or None,
    )


def _exists(name: str) -> bool:
    """Return whether `name` is the path of a file; False for texts that cannot be a path."""
    return bool(name) and "\0" not in name and len(os.fsencode(name)) < 4096 and os.path.lexists(name)


def _integer_option(texts: Mapping[str, str], name: str, option: str) -> int | None:
    """Return the number in an input field; None if it is empty. Raises UserError, which names `option`."""
    text = texts.get(name, "").replace(",", "").replace("_", "")
    if not text:
        return None
    if not (text.isascii() and text.removeprefix("-").isdigit() and len(text) < 20):
        raise UserError(f"{option} must be a whole number, not {cut(texts[name])}", f"for example {DEFAULTS[name]}")
    return int(text)


def plan_page(parameters: Mapping[str, str]) -> str:
    """Return the page of `recipes plan --html` for the values of the input fields, and raise the command's errors."""
    from superpod.planner import plans

    plan_options = options(parameters)
    is_auto = plan_options.precision == AUTO
    job = plan_options.job_to_search(precision=None) if is_auto else plan_options.job_to_search()
    searches = plans.search(job, auto=is_auto)
    return plan.page_text(plan_options, searches, command=plan_options.command("plan"))


class Runs:
    """The runs in a folder, for browser windows that poll every few seconds. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._page = polling.RunsPage(polling.RunPoller(Connection()), self._listing, CACHE_S)
        self._lines: dict[str, live_run.LastLines] = {}

    def _listing(self) -> list[ListedRun]:
        """Return the runs in the folder, without symbolic links to runs outside it."""
        root = self._folder.resolve()
        return [one for one in run_list.list_runs(self._folder) if one.run.path.resolve().is_relative_to(root)]

    def _views(self) -> dict[str, RunView]:
        """Return the state of each run by RECIPE/NAME. Raises UserError if the folder cannot be read."""
        self._page.refresh()
        if self._page.problem:
            raise UserError(self._page.problem)
        return {readable("/".join(view.run.path.parts[-2:])): view for view in self._page.views}

    def all(self) -> dict[str, Any]:
        """Return the rows of the table of runs. Raises UserError if the folder cannot be read."""
        return {"runs": [{"id": name, **_row(view)} for name, view in self._views().items()]}

    def details(self, parameters: Mapping[str, str]) -> dict[str, Any]:
        """Return the messages, ranks, last log lines and, unless "stamp" is current, the curves of the run "run".

        Raises:
            UserError: the folder contains no run of that name.
        """
        name, views = parameters.get("run", ""), self._views()
        if name not in views:
            self._lines.pop(name, None)
            raise UserError(f"run {cut(name)} does not exist", "it may have been moved or removed")
        view = views[name]
        messages = [readable(text) for text in (view.message, view.alarm, *view.resumed) if text]
        answer: dict[str, Any] = {"says": messages, "ranks": [], "lines": [], "stamp": "", "rate_unit": ""}
        if view.state is State.UNREADABLE or not isinstance(view.run, FollowedRun):
            return answer
        try:
            last_lines = self._lines.setdefault(name, live_run.LastLines(view.run))
            answer["lines"] = [readable(line) for line in last_lines.refresh()]
            answer["ranks"] = [readable(line) for line in live_run.describe_ranks(view.run)]
        except OSError as error:
            answer["says"].append(f"{error.filename}: {error.strerror}")
        answer["rate_unit"] = live_run.rate_unit(view.run)
        view.run.file.refresh()
        lines = view.run.file.lines
        answer["stamp"] = f"{view.run.file.begun}-{view.run.file.bytes_read}"
        if answer["stamp"] != parameters.get("stamp"):
            curves = {key: extract_curve(lines, metric, 1000) for key, metric in CURVES.items()}
            answer["curves"] = {
                key: {"x": [x for x, _ in points], "y": [y for _, y in points]} for key, points in curves.items()
            }
        return answer


def _row(view: RunView) -> dict[str, Any]:
    row = {field: getattr(view, field) for field in FIELDS}
    return {field: readable(value) if isinstance(value, str) else value for field, value in row.items()}
