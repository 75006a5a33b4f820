"""What the page of `recipes ui` shows: plans for the values of its controls, and runs of one folder."""

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
from superpod.reports.runs.followed_run import FollowedRun, curve
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
LEAST_S = 1.0
"""Seconds for which what was read of all runs serves every window."""
CURVES = {"loss": "loss", "rate": "tokens_per_s_per_gpu"}
FIELDS = ("state", "step", "max_steps", "loss", "tokens_per_s", "mfu", "eta_s", "attempt", "user")


def page(folder: Path) -> str:
    """The page itself."""
    from superpod.pages.ui import page as ui_page
    from superpod.planner import hardware, models

    facts = hardware.builtin()
    known = sorted({name for gpu in facts.gpus.values() for name in gpu.precisions if name not in ("fp16", "tf32")})
    return ui_page.text(
        models=models.names(),
        gpus=[*dict.fromkeys(facts.nodes)],
        precisions=[*sorted(known, key=lambda name: (name != "bf16", name)), AUTO],
        defaults=DEFAULTS,
        folder=readable(str(folder)),
    )


def options(given: Mapping[str, str]) -> PlanOptions:
    """The planning options that the controls stand for.

    Raises:
        UserError: the model's name is a path, or a number is none.
    """
    from superpod.collection.facts import names

    name = given.get("model", "")
    if name.endswith(".json") or name.startswith(("~", ".", "/")) or _exists(name):
        raise UserError(f"{cut(name)} is a path, and the page plans by names", "recipes plan reads a config.json")
    precision = given.get("precision") or None
    return PlanOptions(
        names.read(name),
        gpu=given.get("gpu") or None,
        gpus=_integer_option(given, "gpus", "--gpus"),
        seq=_integer_option(given, "seq", "--seq"),
        gbs=_integer_option(given, "gbs", "--gbs"),
        precision=precision,
    )


def _exists(name: str) -> bool:
    return bool(name) and "\0" not in name and len(os.fsencode(name)) < 4096 and os.path.lexists(name)


def _integer_option(given: Mapping[str, str], name: str, option: str) -> int | None:
    text = given.get(name, "").replace(",", "").replace("_", "")
    if not text:
        return None
    if not (text.isascii() and text.removeprefix("-").isdigit() and len(text) < 20):
        raise UserError(f"{option} is {cut(given[name])}; it is a whole number", f"such as {DEFAULTS[name]}")
    return int(text)


def plan_page(given: Mapping[str, str]) -> str:
    """The page of `recipes plan --html` for the values of the controls. Raises UserError as the command does."""
    from superpod.planner import plans

    wanted = options(given)
    auto = wanted.precision == AUTO
    searches = plans.search(wanted.job_to_search(**({"precision": None} if auto else {})), auto=auto)
    return plan.page_text(wanted, searches, command=wanted.command("plan"))


class Runs:
    """The runs of a folder, for windows that ask every few seconds. One thread at a time calls it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._page = polling.RunsPage(polling.RunPoller(Connection()), self._listing, LEAST_S)
        self._lines: dict[str, live_run.LastLines] = {}

    def _listing(self) -> list[ListedRun]:
        """Runs that lie in the folder itself: a link in it could lead to any."""
        root = self._folder.resolve()
        return [one for one in run_list.below(self._folder) if one.run.path.resolve().is_relative_to(root)]

    def _views(self) -> dict[str, RunView]:
        """By RECIPE/NAME of the folders. Raises UserError."""
        self._page.refresh()
        if self._page.problem:
            raise UserError(self._page.problem)
        return {readable("/".join(view.run.path.parts[-2:])): view for view in self._page.views}

    def all(self) -> dict[str, Any]:
        """A row a run. Raises UserError where the folder cannot be read."""
        return {"runs": [{"id": name, **_row(view)} for name, view in self._views().items()]}

    def one(self, given: Mapping[str, str]) -> dict[str, Any]:
        """A run's sentences, its ranks, its last lines, and its curves unless `stamp` says that they are known.

        Raises:
            UserError: the folder has no run of that name.
        """
        name, views = given.get("run", ""), self._views()
        if name not in views:
            self._lines.pop(name, None)
            raise UserError(f"there is no run {cut(name)} here", "it may have been moved or removed")
        view = views[name]
        answer: dict[str, Any] = {"says": _says(view), "ranks": [], "lines": [], "stamp": "", "rate_unit": ""}
        if view.state is State.UNREADABLE or not isinstance(view.run, FollowedRun):
            return answer
        try:
            answer["lines"] = [readable(line) for line in self._last(name, view.run).look()]
            answer["ranks"] = [readable(line) for line in live_run.ranks(view.run)]
        except OSError as error:
            answer["says"].append(f"{error.filename}: {error.strerror}")
        answer["rate_unit"] = live_run.rate_unit(view.run)
        view.run.file.look()
        lines = view.run.file.lines
        answer["stamp"] = f"{view.run.file.begun}-{view.run.file.bytes_read}"
        if answer["stamp"] != given.get("stamp"):
            answer["curves"] = {key: _columns(curve(lines, column, 1000)) for key, column in CURVES.items()}
        return answer

    def _last(self, name: str, run: FollowedRun) -> live_run.LastLines:
        return self._lines.setdefault(name, live_run.LastLines(run))


def _row(view: RunView) -> dict[str, Any]:
    row = {field: getattr(view, field) for field in FIELDS}
    return {field: readable(value) if isinstance(value, str) else value for field, value in row.items()}


def _says(view: RunView) -> list[str]:
    return [readable(text) for text in (view.message, view.alarm, *view.resumed) if text]


def _columns(points: Sequence[tuple[int, float]]) -> dict[str, list[float]]:
    return {"x": [x for x, _ in points], "y": [y for _, y in points]}


def failed(error: BaseException) -> None:
    """Say in the terminal that a request has failed on our side, with the traceback in a file."""
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="recipes-", suffix=".log", delete=False) as log:
        traceback.print_exception(error, file=log)
    words = f"error: this is our failure, not yours: {type(error).__name__}: {error}"
    print(f"{readable(words)}\n  next: the traceback is in {log.name}", file=sys.stderr, flush=True)
