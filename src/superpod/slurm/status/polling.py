"""Runs, looked at again and again by a page: their folders each time, Slurm every 30 s, and nothing is written."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.errors import UserError
from superpod.reports import sweep
from superpod.reports.runs import run_list
from superpod.reports.runs.followed_run import FollowedRun
from superpod.slurm.status import run_views
from superpod.slurm.status.job_queue import POLL_S, JobQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from superpod.reports.runs.run_list import ListedRun
    from superpod.runtime.runs.run_folder import RunFolder
    from superpod.slurm.status.run_views import RunView, SlurmSnapshot
    from superpod.slurm.submission.connection import Connection

FIRST_S = 5.0
"""Seconds that the first look waits for Slurm; later ones take its last answer and wait for nothing."""
PAUSE_FACTOR = 20
"""A look at all runs is followed by a pause of so many times what it took: thousands of runs load no file system."""


class RunPoller:
    """Sums runs up from their folders at each look. Slurm is asked beside that, in a thread of its own."""

    def __init__(self, connection: Connection, every_s: float = POLL_S) -> None:
        self._connection, self._every_s = connection, every_s
        self._followed: dict[Path, FollowedRun] = {}
        self._answers: SlurmSnapshot | None = None
        self._thread: threading.Thread | None = None
        self._next_s = 0.0
        self.asked_at: float | None = None
        """Unix time of Slurm's last answer; None where none was needed yet"""

    def followed(self, run: RunFolder) -> FollowedRun:
        """The run, with metrics that are read as they grow."""
        return self._followed.setdefault(run.path, FollowedRun.of(run))

    def views(self, listed: list[ListedRun]) -> list[RunView]:
        """A row a run, in order; one that cannot be read has a row that says why."""
        runs = [self.followed(one.run) for one in listed if not one.problem]
        gone = set(self._followed) - {run.path for run in runs}
        for path in gone:
            del self._followed[path]
        asking = [run for run in runs if not run.is_local]
        self._ask(asking)
        answers = self._answers or run_views.SlurmSnapshot(None if asking else JobQueue())
        seen = {view.run.path: view for view in answers.views([*runs], later=True)}
        return [seen.get(one.run.path) or run_views.unreadable_view(one.run, one.problem) for one in listed]

    def _ask(self, runs: list[FollowedRun]) -> None:
        if not runs or time.monotonic() < self._next_s or (self._thread and self._thread.is_alive()):
            return
        self._next_s = time.monotonic() + self._every_s
        # A daemon: Slurm may take half a minute not to answer, and nobody who leaves waits for that.
        self._thread = threading.Thread(target=self._take_answers, args=(runs,), name="slurm", daemon=True)
        self._thread.start()
        if self._answers is None:
            self._thread.join(FIRST_S)

    def _take_answers(self, runs: list[FollowedRun]) -> None:
        self._answers = run_views.SlurmSnapshot.query([*runs], self._connection)
        self.asked_at = self._answers.at


def list_runs(folder: Path, run: str = "") -> list[ListedRun]:
    """The run or the runs of the sweep that `run` names, or all in `folder`; what cannot be read says why.

    Raises:
        UserError: there is no such folder.
    """
    if not run:
        return run_list.below(folder)
    if sweep.is_sweep(Path(run)):
        return [run_list.listed(path) for _, path in sweep.runs_of(Path(run))]
    return [run_list.listed(Path(run))]


class RunsPage:
    """The rows of a page: looked at as often as its reader wants, and no more often than they are cheap."""

    def __init__(self, looker: RunPoller, listing: Callable[[], list[ListedRun]], least_s: float = 0.0) -> None:
        """`least_s` seconds at least lie between two looks."""
        self.looker, self._listing, self._least_s = looker, listing, least_s
        self._next_s = 0.0
        self.listed: list[ListedRun] = []
        self.views: list[RunView] = []
        self.problem = ""
        """why the folder could not be read at the last look; the rows are then those of the look before"""
        self.looked_at = 0.0

    def look(self) -> None:
        """Look, if it is time to."""
        began = time.monotonic()
        if began < self._next_s:
            return
        try:
            self.listed = self._listing()
            self.views = self.looker.views(self.listed)
            self.problem, self.looked_at = "", time.time()
        except (UserError, OSError) as error:
            self.problem = str(error)
        pause_s = (1 + PAUSE_FACTOR) * (time.monotonic() - began) if len(self.listed) > 1 else 0.0
        self._next_s = began + max(pause_s, self._least_s)
