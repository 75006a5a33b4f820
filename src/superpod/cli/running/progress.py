"""The progress of a training, read from its metrics: a bar on a terminal; elsewhere ten lines over the run."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.spinner import Spinner
from rich.text import Text

from superpod.cli import tables
from superpod.common.files import tail_lines
from superpod.runtime.processes.local_ranks import STOPS
from superpod.runtime.runs.run_folder import RunFolder

NEWS_S = 0.5
"""Seconds between two looks at what a wait is for, where there is no terminal: a line for each stage, and no more."""


def draws(console: Console) -> bool:
    """Whether what is shown can be drawn over: a terminal, and not a dumb one (TERM=dumb)."""
    return console.is_terminal and not console.is_dumb_terminal


class _Wait:
    """A spinner with what is waited for, what the waiting process does now, and for how long."""

    def __init__(self, message: str, stage: Callable[[], str]) -> None:
        self._message, self._stage, self._began = message, stage, time.monotonic()
        self._spinner = Spinner("line")  # of plain characters: every terminal has them

    def stage(self) -> str:
        """What the waiting process does now."""
        return self._stage()

    def line(self) -> str:
        """In words."""
        stage = self._stage()
        took = time.monotonic() - self._began
        return f"{self._message}{f': {stage}' if stage else ''}" + (f" ({took:.0f} s)" if took >= 1 else "")

    def __rich__(self) -> Spinner:
        self._spinner.update(text=Text(self.line()))
        return self._spinner


@contextmanager
def waiting(console: Console, message: str) -> Iterator[None]:
    """Show what the command is waiting for: a spinner and seconds on a terminal; elsewhere a line for each stage.

    What `superpod.common.stages.note` says meanwhile, here or in a process that this one starts, stands beside it.
    Rich's `console.status` does not serve: it sends whatever is printed meanwhile to the terminal, past `quietly`.
    """
    from superpod.common import stages

    with stages.watched() as stage:
        wait = _Wait(message, stage)
        if draws(console):
            with Live(wait, console=console, transient=True, redirect_stdout=False, redirect_stderr=False):
                yield
            return
        console.print(message, markup=False, highlight=False, soft_wrap=True)
        ended = threading.Event()

        def print_news() -> None:
            shown = ""
            while not ended.wait(NEWS_S):
                if (now := wait.stage()) in ("", shown):
                    continue
                shown = now
                console.print(f"... {wait.line()}", markup=False, highlight=False, soft_wrap=True)

        thread = threading.Thread(target=print_news, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


@contextmanager
def quiet_wait(message: str) -> Iterator[None]:
    """`waiting` on stderr, with what libraries print meanwhile kept off the terminal."""
    from superpod.common.quiet import quietly

    with quietly() as terminal, waiting(tables.console(terminal), message):
        yield


def on_stderr() -> Console:
    """A console for progress beside answers: these go to stdout."""
    return Console(stderr=True)


@contextmanager
def leaving_at_once(console: Console, tidy: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Make Ctrl-C call `tidy` and exit at once: bare excepts in what NeMo imports would swallow a KeyboardInterrupt.

    So do `kill`, and a closed terminal where it is not ignored.
    """
    from superpod.cli.exits import leave_interrupted

    def leave(*_: object) -> None:
        tidy()
        with contextlib.suppress(OSError):  # the terminal may be closed
            console.show_cursor(True)
        leave_interrupted(console.file)

    before = {number: signal.getsignal(number) for number in STOPS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


BEFORE_STEP_1 = {
    "": "importing NeMo in every rank",
    "start": "building the model and loading its weights",
    "train": "making the first step, which compiles kernels",
}
"""What a rank does before it has made a step, by the phase of its heartbeat."""


class Steps:
    """Shows how far a run is; `first` is its step when this attempt began, `last` the newest one."""

    def __init__(self, console: Console, folder: RunFolder, max_steps: int) -> None:
        self._console = console
        self._metrics = folder.path / "metrics.jsonl"
        self.first = self.last = max((line["step"] for line in folder.metrics()), default=0)
        self._size = self._bytes()
        self._every = max(1, max_steps // 10)
        self._max_steps = max_steps
        self._bar = Progress(
            SpinnerColumn("line"),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not draws(console),
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._folder, self._began, self._next_look = folder, time.monotonic(), 0.0
        self._doing = "starting the ranks"
        self._task = self._bar.add_task(self._doing, total=max_steps)

    def __enter__(self) -> Steps:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def tick(self, message: str = "") -> None:
        """Print `message`, if any; read the metrics and redraw if they have grown."""
        if message:
            self._console.print(message, style="yellow", highlight=False)
        size = self._bytes()
        if size == self._size:
            if self.last == self.first:
                self._show_start()
            return
        self._size = size
        lines = [line for line in tail_lines(self._metrics) if isinstance(line.get("step"), int)]
        if not lines:
            return
        line = lines[-1]
        figures = _figures(line)
        self._bar.update(self._task, completed=line["step"], description=figures)
        if not draws(self._console) and (line["step"] // self._every > self.last // self._every):
            self._console.print(f"step {line['step']}/{self._max_steps}  {figures}", highlight=False)
        self.last = line["step"]

    def _show_start(self) -> None:
        """Before the first step: what rank 0 does, and for how long; elsewhere than on a terminal a line a change."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + 1.0
        attempt = self._folder.attempts[-1] if self._folder.attempts else None
        phase = str(attempt.heartbeat().get("phase", "")) if attempt else ""
        doing = BEFORE_STEP_1.get(phase, self._doing)
        self._bar.update(self._task, description=f"{doing} ({time.monotonic() - self._began:.0f} s)")
        if not draws(self._console) and doing != self._doing:
            self._console.print(doing, highlight=False)
        self._doing = doing

    def _bytes(self) -> int:
        return self._metrics.stat().st_size if self._metrics.exists() else 0


def _figures(line: dict[str, Any]) -> str:
    figures = [f"loss {line['loss']:.3f}"] if line.get("loss") is not None else []
    figures += [f"val {line['val_loss']:.3f}"] if line.get("val_loss") is not None else []
    figures += [f"{line['step_time_s']:.2f} s/step"] if line.get("step_time_s") else []
    return "  ".join(figures)
