"""Polls the state of runs for a live page: reads their folders at each poll, and queries Slurm every 30 s."""

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
"""Maximum seconds that the first poll waits for Slurm; later polls use the last answer."""
PAUSE_FACTOR = 20
"""Minimum pause after a poll of several runs, as a multiple of its duration; it limits the file system load."""


class RunPoller:
    """Summarizes runs at each poll; Slurm is queried in a separate thread."""

    def __init__(self, connection: Connection, every_s: float = POLL_S) -> None:
        self._connection, self._every_s = connection, every_s
        self._followed: dict[Path, FollowedRun] = {}
        self._snapshot: SlurmSnapshot | None = None
        self._thread: threading.Thread | None = None
        self._next_s = 0.0
        self.asked_at: float | None = None
        """Unix time of Slurm's last answer; None before the first"""

    def follow(self, run: RunFolder) -> FollowedRun:
        """Return the reader of a run's metrics, which reads only new lines at each poll."""
        return self._followed.setdefault(run.path, FollowedRun.follow(run))

    def views(self, listed: list[ListedRun]) -> list[RunView]:
        """Return a summary per run, in order; that of an unreadable run contains the reason."""
        runs = [self.follow(one.run) for one in listed if not one.problem]
        for path in set(self._followed) - {run.path for run in runs}:
            del self._followed[path]
        slurm_runs = [run for run in runs if not run.is_local]
        self._query(slurm_runs)
        snapshot = self._snapshot or run_views.SlurmSnapshot(None if slurm_runs else JobQueue())
        views_by_path = {view.run.path: view for view in snapshot.summarize([*runs], ask_later=True)}
        return [views_by_path.get(one.run.path) or run_views.unreadable_view(one.run, one.problem) for one in listed]

    def _query(self, runs: list[FollowedRun]) -> None:
        """Start a query of Slurm in a thread, if one is due and none is running."""
        if not runs or time.monotonic() < self._next_s or (self._thread and self._thread.is_alive()):
            return
        self._next_s = time.monotonic() + self._every_s
        # A daemon thread: squeue may take half a minute to time out, and the command must not wait for it on exit.
        self._thread = threading.Thread(target=self._take_snapshot, args=(runs,), name="slurm", daemon=True)
        self._thread.start()
        if self._snapshot is None:
            self._thread.join(FIRST_S)

    def _take_snapshot(self, runs: list[FollowedRun]) -> None:
        self._snapshot = run_views.SlurmSnapshot.query([*runs], self._connection)
        self.asked_at = self._snapshot.at


def list_runs(folder: Path, run: str = "") -> list[ListedRun]:
    """Return the run or the members of the sweep `run`; if it is "", all runs in `folder`. Includes unreadable runs.

    Raises:
        UserError: the folder does not exist.
    """
    if not run:
        return run_list.list_runs(folder)
    if sweep.is_sweep(Path(run)):
        return [run_list.inspect_run(path) for _, path in sweep.read_members(Path(run))]
    return [run_list.inspect_run(Path(run))]


class RunsPage:
    """The runs of a live page, refreshed on request but at a limited rate."""

    def __init__(self, poller: RunPoller, listing: Callable[[], list[ListedRun]], min_interval_s: float = 0.0) -> None:
        """Initialize the page without polling; `min_interval_s` is the minimum interval of polls in seconds."""
        self.poller, self._listing, self._min_interval_s = poller, listing, min_interval_s
        self._next_s = 0.0
        self.listed: list[ListedRun] = []
        self.views: list[RunView] = []
        self.problem = ""
        """error message of the last poll if it failed; the views are then from an earlier poll"""
        self.refreshed_at = 0.0
        """Unix time of the last successful poll"""

    def refresh(self) -> None:
        """Update `views` and `problem` if a poll is due."""
        began = time.monotonic()
        if began < self._next_s:
            return
        try:
            self.listed = self._listing()
            self.views = self.poller.views(self.listed)
            self.problem, self.refreshed_at = "", time.time()
        except (UserError, OSError) as error:
            self.problem = str(error)
        pause_s = 0.0
        if len(self.listed) > 1:
            pause_s = (1 + PAUSE_FACTOR) * (time.monotonic() - began)
        self._next_s = began + max(pause_s, self._min_interval_s)
