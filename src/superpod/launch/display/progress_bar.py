"""Show the progress of a run, read from its metrics: a bar on a terminal, otherwise about ten lines per run."""

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

from superpod.common.json_files import tail_lines
from superpod.launch.display import consoles
from superpod.launch.display.exits import exit_interrupted
from superpod.runtime.processes.local_ranks import STOPS
from superpod.runtime.runs.run_folder import RunFolder

POLL_S = 0.5
"""Seconds between two reads of the current stage. Without a terminal, each new stage is printed once."""


def can_redraw(console: Console) -> bool:
    """Return whether output can be redrawn: on a terminal other than TERM=dumb."""
    return console.is_terminal and not console.is_dumb_terminal


class _Wait:
    """A spinner with a message, the current stage of the work (from `stage`) and the elapsed time."""

    def __init__(self, message: str, stage: Callable[[], str]) -> None:
        self._message, self._stage, self._began = message, stage, time.monotonic()
        self._spinner = Spinner("line")  # ASCII characters, for every terminal

    def line(self) -> str:
        """Return the message with the current stage and the elapsed time."""
        text = self._message
        stage = self._stage()
        if stage:
            text += f": {stage}"
        elapsed = time.monotonic() - self._began
        if elapsed >= 1:
            text += f" ({elapsed:.0f} s)"
        return text

    def __rich__(self) -> Spinner:
        self._spinner.update(text=Text(self.line()))
        return self._spinner


@contextmanager
def spinner(console: Console, message: str) -> Iterator[None]:
    """Show `message` during the block: with a spinner and the elapsed time on a terminal, otherwise a line per stage.

    The current stage is the newest text passed to `progress_file.note`, in this process or its children. Rich's
    `console.status` would print captured output to the terminal despite `silence_libraries`.
    """
    from superpod.common import progress_file

    with progress_file.watch() as stage:
        wait = _Wait(message, stage)
        if can_redraw(console):
            with Live(wait, console=console, transient=True, redirect_stdout=False, redirect_stderr=False):
                yield
            return
        consoles.print_plain(console, message)
        has_ended = threading.Event()

        def print_stages() -> None:
            last_stage = ""
            while not has_ended.wait(POLL_S):
                current_stage = stage()
                if current_stage in ("", last_stage):
                    continue
                last_stage = current_stage
                consoles.print_plain(console, f"... {wait.line()}")

        thread = threading.Thread(target=print_stages, daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()


@contextmanager
def quiet_spinner(message: str) -> Iterator[None]:
    """Show a spinner on the terminal like `spinner`, and suppress the output of libraries."""
    from superpod.common.quiet import silence_libraries

    with silence_libraries() as terminal, spinner(consoles.console(terminal), message):
        yield


def stderr_console() -> Console:
    """Return a console on stderr for progress, so that stdout contains only the result."""
    return Console(stderr=True)


@contextmanager
def exit_on_interrupt(console: Console, clean_up: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Within the block, make Ctrl-C and other stop signals call `clean_up` and exit with code 130.

    Modules that NeMo imports contain bare `except` clauses, which would swallow a KeyboardInterrupt.
    """

    def leave(*_: object) -> None:
        clean_up()
        with contextlib.suppress(OSError):  # the terminal may be closed
            console.show_cursor(True)
        exit_interrupted(console.file)

    old_handlers = {number: signal.getsignal(number) for number in STOPS}
    for number, handler in old_handlers.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


STARTUP_ACTIVITIES = {
    "": "importing NeMo in every rank",
    "start": "building the model and loading its weights",
    "train": "running the first step, which compiles kernels",
}
"""Activity of a rank before its first step, per phase in its heartbeat."""


class StepProgress:
    """Shows the progress of a run. `first` is its last step before this attempt, `last` its newest step."""

    def __init__(self, console: Console, folder: RunFolder, max_steps: int) -> None:
        self._console = console
        self._metrics = folder.path / "metrics.jsonl"
        self.first = self.last = max((line["step"] for line in folder.metrics()), default=0)
        self._shown_bytes = self._metrics_bytes()
        self._every = max(1, max_steps // 10)
        self._max_steps = max_steps
        self._bar = Progress(
            SpinnerColumn("line"),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not can_redraw(console),
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._folder, self._began, self._next_update = folder, time.monotonic(), 0.0
        self._activity = "starting the ranks"
        self._task = self._bar.add_task(self._activity, total=max_steps)

    def __enter__(self) -> StepProgress:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def tick(self, message: str = "") -> None:
        """Print `message` unless it is empty; redraw the progress if the metrics file has grown."""
        if message:
            self._console.print(message, style="yellow", highlight=False)
        size = self._metrics_bytes()
        if size == self._shown_bytes:
            if self.last == self.first:
                self._show_start()
            return
        self._shown_bytes = size
        lines = [line for line in tail_lines(self._metrics) if isinstance(line.get("step"), int)]
        if not lines:
            return
        line = lines[-1]
        metrics = _format_metrics(line)
        self._bar.update(self._task, completed=line["step"], description=metrics)
        if not can_redraw(self._console) and (line["step"] // self._every > self.last // self._every):
            self._console.print(f"step {line['step']}/{self._max_steps}  {metrics}", highlight=False)
        self.last = line["step"]

    def _show_start(self) -> None:
        """Show the activity of rank 0 before the first step; without a terminal, print a line per change."""
        if time.monotonic() < self._next_update:
            return
        self._next_update = time.monotonic() + 1.0
        attempt = self._folder.attempts[-1] if self._folder.attempts else None
        phase = str(attempt.heartbeat().get("phase", "")) if attempt else ""
        activity = STARTUP_ACTIVITIES.get(phase, self._activity)
        self._bar.update(self._task, description=f"{activity} ({time.monotonic() - self._began:.0f} s)")
        if not can_redraw(self._console) and activity != self._activity:
            self._console.print(activity, highlight=False)
        self._activity = activity

    def _metrics_bytes(self) -> int:
        return self._metrics.stat().st_size if self._metrics.exists() else 0


def _format_metrics(line: dict[str, Any]) -> str:
    parts = []
    if line.get("loss") is not None:
        parts.append(f"loss {line['loss']:.3f}")
    if line.get("val_loss") is not None:
        parts.append(f"val {line['val_loss']:.3f}")
    if line.get("step_time_s"):
        parts.append(f"{line['step_time_s']:.2f} s/step")
    return "  ".join(parts)
