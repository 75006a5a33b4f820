"""The progress of a training, read from its metrics: a bar on a terminal; elsewhere ten lines over the run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.spinner import Spinner

from superpod.node.files import tail_lines
from superpod.node.run_folder import RunFolder


@contextmanager
def waiting(console: Console, message: str) -> Iterator[None]:
    """Show what the command is waiting for: a spinner on a terminal, a line elsewhere.

    Rich's `console.status` does not serve: it sends whatever is printed meanwhile to the terminal, past `quietly`.
    """
    if not console.is_terminal:
        console.print(message, highlight=False)
        yield
        return
    spinner = Spinner("dots", message)
    with Live(spinner, console=console, transient=True, redirect_stdout=False, redirect_stderr=False):
        yield


@contextmanager
def leaving_at_once(console: Console, tidy: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Make Ctrl-C call `tidy` and exit at once: bare excepts in what NeMo imports would swallow a KeyboardInterrupt."""
    from superpod.cli import leave_interrupted

    def leave(*_: object) -> None:
        tidy()
        console.show_cursor(True)
        leave_interrupted(console.file)

    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("starting the ranks", total=max_steps)

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
            return
        self._size = size
        lines = [line for line in tail_lines(self._metrics) if isinstance(line.get("step"), int)]
        if not lines:
            return
        line = lines[-1]
        figures = _figures(line)
        self._bar.update(self._task, completed=line["step"], description=figures)
        if not self._console.is_terminal and (line["step"] // self._every > self.last // self._every):
            self._console.print(f"step {line['step']}/{self._max_steps}  {figures}", highlight=False)
        self.last = line["step"]

    def _bytes(self) -> int:
        return self._metrics.stat().st_size if self._metrics.exists() else 0


def _figures(line: dict[str, Any]) -> str:
    figures = [f"loss {line['loss']:.3f}"] if line.get("loss") is not None else []
    figures += [f"val {line['val_loss']:.3f}"] if line.get("val_loss") is not None else []
    figures += [f"{line['step_time_s']:.2f} s/step"] if line.get("step_time_s") else []
    return "  ".join(figures)
