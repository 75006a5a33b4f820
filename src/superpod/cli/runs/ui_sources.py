"""Data for the page of `recipes ui`: plans for the values of its controls, and the runs in one folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
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
"""Seconds for which the state of all runs is cached, shared by all browser windows."""
CURVES = {"loss": "loss", "rate": "tokens_per_s_per_gpu"}
FIELDS = ("state", "step", "max_steps", "loss", "tokens_per_s", "mfu", "eta_s", "attempt", "user")


def page(folder: Path) -> str:
    """Return the HTML page."""
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
    """Return the planning options for the values of the controls.

    Raises:
        UserError: the model is given as a path, or a value is not a number.
    """
    from superpod.collection.facts import names

    name = parameters.get("model", "")
    if name.endswith(".json") or name.startswith(("~", ".", "/")) or _exists(name):
        raise UserError(
            f"{cut(name)} is a path, but the page accepts only model names", "use `recipes plan` for a config.json"
        )
    precision = parameters.get("precision") or None
    return PlanOptions(
        names.translate(name),
        gpu=parameters.get("gpu") or None,
        gpus=_integer_option(parameters, "gpus", "--gpus"),
        seq=_integer_option(parameters, "seq", "--seq"),
        gbs=_integer_option(parameters, "gbs", "--gbs"),
        precision=precision,
    )


def _exists(name: str) -> bool:
    return bool(name) and "\0" not in name and len(os.fsencode(name)) < 4096 and os.path.lexists(name)


def _integer_option(texts: Mapping[str, str], name: str, option: str) -> int | None:
    text = texts.get(name, "").replace(",", "").replace("_", "")
    if not text:
        return None
    if not (text.isascii() and text.removeprefix("-").isdigit() and len(text) < 20):
        raise UserError(f"{option} must be a whole number, not {cut(texts[name])}", f"for example {DEFAULTS[name]}")
    return int(text)


def plan_page(parameters: Mapping[str, str]) -> str:
    """Return the page of `recipes plan --html` for the values of the controls. Raises UserError as the command does."""
    from superpod.planner import plans

    plan_options = options(parameters)
    is_auto = plan_options.precision == AUTO
    job = plan_options.job_to_search(precision=None) if is_auto else plan_options.job_to_search()
    searches = plans.search(job, auto=is_auto)
    return plan.page_text(plan_options, searches, command=plan_options.command("plan"))


class Runs:
    """The runs of a folder, for browser windows that poll every few seconds. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._page = polling.RunsPage(polling.RunPoller(Connection()), self._listing, CACHE_S)
        self._lines: dict[str, live_run.LastLines] = {}

    def _listing(self) -> list[ListedRun]:
        """List the runs inside the folder; a symbolic link to a run elsewhere is left out."""
        root = self._folder.resolve()
        return [one for one in run_list.list_runs(self._folder) if one.run.path.resolve().is_relative_to(root)]

    def _views(self) -> dict[str, RunView]:
        """Return a dict from RECIPE/NAME to the state of the run. Raises UserError."""
        self._page.refresh()
        if self._page.problem:
            raise UserError(self._page.problem)
        return {readable("/".join(view.run.path.parts[-2:])): view for view in self._page.views}

    def all(self) -> dict[str, Any]:
        """Return a row per run. Raises UserError if the folder cannot be read."""
        return {"runs": [{"id": name, **_row(view)} for name, view in self._views().items()]}

    def details(self, parameters: Mapping[str, str]) -> dict[str, Any]:
        """Return a run's messages, ranks and last log lines, and its curves if they changed since `stamp`.

        Raises:
            UserError: the folder contains no run of that name.
        """
        name, views = parameters.get("run", ""), self._views()
        if name not in views:
            self._lines.pop(name, None)
            raise UserError(f"run {cut(name)} does not exist", "it may have been moved or removed")
        view = views[name]
        answer: dict[str, Any] = {"says": _messages(view), "ranks": [], "lines": [], "stamp": "", "rate_unit": ""}
        if view.state is State.UNREADABLE or not isinstance(view.run, FollowedRun):
            return answer
        try:
            answer["lines"] = [readable(line) for line in self._last(name, view.run).refresh()]
            answer["ranks"] = [readable(line) for line in live_run.describe_ranks(view.run)]
        except OSError as error:
            answer["says"].append(f"{error.filename}: {error.strerror}")
        answer["rate_unit"] = live_run.rate_unit(view.run)
        view.run.file.refresh()
        lines = view.run.file.lines
        answer["stamp"] = f"{view.run.file.begun}-{view.run.file.bytes_read}"
        if answer["stamp"] != parameters.get("stamp"):
            answer["curves"] = {key: _columns(extract_curve(lines, column, 1000)) for key, column in CURVES.items()}
        return answer

    def _last(self, name: str, run: FollowedRun) -> live_run.LastLines:
        return self._lines.setdefault(name, live_run.LastLines(run))


def _row(view: RunView) -> dict[str, Any]:
    row = {field: getattr(view, field) for field in FIELDS}
    return {field: readable(value) if isinstance(value, str) else value for field, value in row.items()}


def _messages(view: RunView) -> list[str]:
    return [readable(text) for text in (view.message, view.alarm, *view.resumed) if text]


def _columns(points: Sequence[tuple[int, float]]) -> dict[str, list[float]]:
    return {"x": [x for x, _ in points], "y": [y for _, y in points]}


def report_error(error: BaseException) -> None:
    """Print an internal error of a request on stderr, with the traceback in a file."""
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="recipes-", suffix=".log", delete=False) as log:
        traceback.print_exception(error, file=log)
    message = readable(f"error: internal error: {type(error).__name__}: {error}")
    print(f"{message}\n  next: report it with the traceback in {log.name}", file=sys.stderr, flush=True)
