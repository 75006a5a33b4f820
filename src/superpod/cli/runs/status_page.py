"""The live page of `recipes status --watch`: runs, curves, ranks and log lines in a terminal. Changes nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.segment import Segment, SegmentLines
from rich.text import Text

from superpod.cli import tables
from superpod.cli.runs import run_rows
from superpod.cli.terminal_keys import Keys
from superpod.errors import readable
from superpod.reports import curves
from superpod.reports.runs import followed_run, live_run
from superpod.reports.runs.followed_run import FollowedRun
from superpod.reports.runs.run_list import ListedRun
from superpod.runtime.runs.run_folder import RunFolder
from superpod.runtime.runs.run_state import State
from superpod.slurm.status import polling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from superpod.common.json_files import JsonObject
    from superpod.slurm.status.run_views import RunView
    from superpod.slurm.submission.connection import Connection

Lines = list[list[Segment]]
LIVE_STATES = (State.RUNNING, State.SAVING, State.STALLED)
MIN_SIDE_BY_SIDE_WIDTH = 72
"""Minimum width in characters for plotting the two curves side by side."""
MIN_CURVE_HEIGHT = 4
"""Minimum height of a curve in lines, including its title and axis."""
RESIZE_S = 0.2
"""Seconds between two checks of the terminal size."""
RATE = "tokens_per_s_per_gpu"


def show(folder: Path, run: str, slurm: Connection, *, everybody: bool, every_s: float) -> None:
    """Show the page until the user presses q or Ctrl-C.

    Args:
        folder: folder that contains the run folders.
        run: run or sweep to show; "" = all runs in `folder`.
        slurm: connection to Slurm.
        everybody: also show the runs of other users.
        every_s: seconds between two updates.

    Raises:
        UserError: the folder or the run cannot be read at the first update.
    """
    first_runs = polling.list_runs(folder, run)
    if run and first_runs and first_runs[0].problem and first_runs[0].run.path == Path(run).absolute():
        RunFolder.open(run)

    def listing() -> list[ListedRun]:
        return [one for one in polling.list_runs(folder, run) if run or everybody or one.mine]

    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)  # rich would ignore changes of the terminal's size
    console = Console(highlight=False)
    page = StatusPage(polling.RunsPage(polling.RunPoller(slurm), listing), console, run or str(folder))
    try:
        with Keys() as keys, Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False) as screen:
            while True:
                page.refresh()
                screen.update(page.render(), refresh=True)
                if not _wait_for_update(page, keys, screen, every_s):
                    return
    except KeyboardInterrupt:
        return


def _wait_for_update(page: StatusPage, keys: Keys, screen: Live, every_s: float) -> bool:
    """Wait `every_s` seconds, and redraw the page if a key is pressed or the terminal is resized.

    Returns:
        False as soon as the user presses q, otherwise True.
    """
    until, size = time.monotonic() + every_s, page.console.size
    while True:
        left_s = until - time.monotonic()
        if left_s <= 0:
            return True
        key = keys.wait(min(left_s, RESIZE_S))
        if key == "q":
            return False
        if key or page.console.size != size:
            page.move({"up": -1, "down": 1}.get(key, 0))
            size = page.console.size
            screen.update(page.render(), refresh=True)


class StatusPage:
    """The contents of the live page, rendered at the size of the terminal."""

    def __init__(self, runs: polling.RunsPage, console: Console, subject: str) -> None:
        self.console, self._runs, self._subject = console, runs, subject
        self._chosen: Path | None = None
        self._lines: dict[Path, live_run.LastLines] = {}
        self._logs: list[str] = []
        self._ranks: list[str] = []
        utf = console.encoding.lower().replace("-", "").startswith("utf")
        self._has_braille = utf and os.environ.get("TERM") != "linux"

    def refresh(self) -> None:
        """Read the state of all runs, and the log and heartbeats of the selected run."""
        self._runs.refresh()
        views = self._runs.views
        if self._chosen is None or all(view.run.path != self._chosen for view in views):
            live_views = [view for view in views if view.state in LIVE_STATES] or views
            self._chosen = live_views[-1].run.path if live_views else None
        self._logs, self._ranks = [], []
        view = self._view
        if view is not None and view.state is not State.UNREADABLE:
            log = self._lines.setdefault(view.run.path, live_run.LastLines(view.run))
            try:
                self._logs, self._ranks = log.refresh(), live_run.describe_ranks(view.run)
            except OSError as error:  # the folder is being removed; the next update reports it
                self._logs = [f"{error.filename}: {error.strerror}"]

    @property
    def _view(self) -> RunView | None:
        return next((view for view in self._runs.views if view.run.path == self._chosen), None)

    def move(self, by: int) -> None:
        """Select the run `by` rows below the selected one, or above it if `by` is negative; 0 does nothing."""
        paths = [view.run.path for view in self._runs.views]
        if by and self._chosen in paths:
            index = paths.index(self._chosen) + by
            self._chosen = paths[max(0, min(index, len(paths) - 1))]
            self.refresh()

    def render(self) -> RenderableType:
        """Return the page, with at most as many lines as the terminal."""
        width, height = self.console.size
        lines = self._text([self._head(width)], width)
        lines += self._rows(width, max(4, height // 3))
        view = self._view
        if view is not None:
            messages = [Text(line, style="yellow") for line in run_rows.messages([view])]
            lines += self._text(messages, width)[:4]
            lines += self._detail(view, width, height - len(lines))
        return SegmentLines(lines[:height], new_lines=True)

    def _text(self, texts: list[Text], width: int, *, wrap: bool = True) -> Lines:
        """Return texts as lines of at most `width` characters, wrapped or cropped."""
        options = self.console.options.update(width=width, height=None, no_wrap=not wrap)
        options.overflow = None if wrap else "crop"
        return [line for text in texts for line in self.console.render_lines(text, options, pad=False)]

    def _head(self, width: int) -> Text:
        clock = time.strftime("%H:%M:%S")
        answer_time = self._runs.poller.asked_at
        slurm = f", Slurm queried {tables.format_duration(time.time() - answer_time)} ago" if answer_time else ""
        title = f"{clock}{slurm}  q: quit"
        subject = readable(self._subject)
        if len(subject) + 2 + len(title) <= width:
            title = f"{subject}  {title}"
        head = Text(title, style="dim")
        if self._runs.problem:
            head.append(f"\n{readable(self._runs.problem)}", style="red")
        elif not self._runs.views:
            head.append("\nno runs", style="yellow")
        return head

    def _rows(self, width: int, max_lines: int) -> Lines:
        """Return the table of runs in at most `max_lines` lines, with the rows around the selected run."""
        views = self._runs.views
        if not views:
            return []
        selected = next((i for i, view in enumerate(views) if view.run.path == self._chosen), len(views) - 1)
        several = len(views) > 1
        rows = run_rows.table(views)
        if not run_rows.is_too_wide(rows, width):
            first, last = _window(selected, len(views), max_lines - 2)
            rows = run_rows.table(views[first:last], selected_row=selected - first if several else None)
            lines = self.console.render_lines(rows, self.console.options.update(width=width, height=None), pad=False)
        else:
            texts = [run_rows.lines(view, width, is_selected=several and i == selected) for i, view in enumerate(views)]
            first, last = _window(selected, len(views), max(1, (max_lines - 1) // max(map(len, texts))))
            lines = self._text([line for body in texts[first:last] for line in body], width)
        hidden_count = len(views) - (last - first)
        if hidden_count:
            lines += self._text([Text(f"{hidden_count} more: press the up or down arrow", style="dim")], width)
        return lines

    def _detail(self, view: RunView, width: int, height: int) -> Lines:
        """Return the curves, the ranks and the log lines of the selected run, in at most `height` lines."""
        if height < 3:
            return []
        rule = "─" if self._has_braille else "-"
        title = Text(f"{rule} {run_rows.name(view)} ".ljust(width, rule))
        lines = self._text([title], width, wrap=False)
        ranks = self._text([Text(readable(line)) for line in self._ranks], width)[: max(1, height // 4)]
        free_height = height - len(lines) - len(ranks)
        log_height = min(len(self._logs), max(3, free_height // 3)) + bool(self._logs)
        if free_height - log_height >= MIN_CURVE_HEIGHT:
            lines += self._curves(view, width, free_height - log_height)
        lines += ranks
        free_height = height - len(lines)
        if self._logs and free_height > 1:
            lines += self._text([Text("last log lines", style="bold")], width)
            newest_lines = [Text(readable(line)) for line in self._logs[-(free_height - 1) :]]
            lines += self._text(newest_lines, width, wrap=False)
        return lines

    def _curves(self, view: RunView, width: int, height: int) -> Lines:
        """Return the curves of loss and throughput, side by side or stacked; only the loss if `height` is too small."""
        lines = view.run.file.lines if isinstance(view.run, FollowedRun) else []
        titles = (("loss", "loss, nats/token"), (RATE, live_run.rate_unit(view.run)))
        if width >= MIN_SIDE_BY_SIDE_WIDTH:
            half_width = (width - 2) // 2
            left, right = (self._curve(lines, key, title, half_width, min(height, 14)) for key, title in titles)
            for text in left:
                text.pad_right(half_width + 2 - text.cell_len)
            return self._text([a + b for a, b in zip(left, right, strict=True)], width, wrap=False)
        curve_height, shown = min(height // 2, 9), titles
        if curve_height < MIN_CURVE_HEIGHT:
            curve_height, shown = min(height, 9), titles[:1]
        texts = [text for key, title in shown for text in self._curve(lines, key, title, width, curve_height)]
        return self._text(texts, width, wrap=False)

    def _curve(self, lines: Sequence[JsonObject], key: str, title: str, width: int, height: int) -> list[Text]:
        """Return exactly `height` lines: the title with the newest value, and the curve of the metric `key`."""
        points = followed_run.extract_curve(
            lines, key, max_points=2 * width
        )  # braille has two columns of dots per character
        newest_value = f": {points[-1][1]:,.4g} at step {points[-1][0]:,}" if points else ": no data yet"
        curve_list = [curves.Curve([x for x, _ in points], [y for _, y in points])]
        body = curves.draw_curves(curve_list, width=width, height=height - 2, braille=self._has_braille)
        return [Text((title + newest_value)[:width]), *body, *[Text() for _ in range(height - 1 - len(body))]]


def _window(at: int, count: int, size: int) -> tuple[int, int]:
    """Return the first row and the end of a range of at most `size` of `count` rows around row `at`."""
    size = max(1, size)
    first = max(0, min(at - size // 2, count - size))
    return first, min(count, first + size)
