"""`recipes ui`: serve a web page with the planner and the runs on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
from collections.abc import Coroutine
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from superpod.cli import report_internal_error
from superpod.cli.options.request_options import Runs
from superpod.errors import UserError

if TYPE_CHECKING:
    from superpod.pages.ui import server

INSTALL = "pip install -c constraints.txt -e '.[ui]'"


def ui(
    runs: Runs = Path("runs"),
    port: Annotated[int, typer.Option("--port", help="Port on 127.0.0.1 and ::1; 0 = any free port.")] = 0,
) -> None:
    """Serve a web page with an interactive planner and live curves of runs on this machine. Changes nothing."""
    import asyncio

    _require_packages()
    _refuse_output_file()
    if os.path.lexists(runs) and not runs.is_dir():
        raise UserError(f"--runs {runs} is not a folder", "pass the folder of the runs, which need not exist yet")
    from superpod.pages.ui import access, server, sockets

    listening, token = sockets.open_sockets(port), access.new_token()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until the event loop handles it
    try:
        sources = _sources(runs)
        print(f"http://127.0.0.1:{listening[0].getsockname()[1]}/{token}/", flush=True)
        _print_notes(listening[0].getsockname()[1])
        asyncio.run(_serve_until_interrupted(server.serve(listening, token, sources)))
        print("\nstopped: the page is no longer served", file=sys.stderr)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for one in listening:
            one.close()


async def _serve_until_interrupted(serving: Coroutine[Any, Any, None]) -> None:
    """Run the server until SIGINT, which cancels it."""
    import asyncio

    task = asyncio.ensure_future(serving)
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _sources(folder: Path) -> server.Sources:
    from superpod.cli.runs import ui_sources
    from superpod.pages.ui import server

    shown_runs = ui_sources.Runs(folder)
    return server.Sources(
        page=lambda: ui_sources.page(folder),
        plan=ui_sources.plan_page,
        runs=shown_runs.all,
        run=shown_runs.details,
        failed=report_internal_error,
    )


def _require_packages() -> None:
    missing_packages = [
        name for name, module in (("Bokeh", "bokeh"), ("Tornado", "tornado")) if find_spec(module) is None
    ]
    if missing_packages:
        raise UserError(f"`recipes ui` needs {' and '.join(missing_packages)}, not installed here", INSTALL)


def _refuse_output_file() -> None:
    """Raise UserError if stdout is a file, which would store the address with its access token."""
    try:
        kind = os.fstat(sys.stdout.fileno()).st_mode
    except (OSError, ValueError):
        return
    if stat.S_ISREG(kind):
        raise UserError(
            "standard output is a file, which would store the address with its access token",
            "start the command in a terminal; tmux keeps it running after you log out",
        )


def _print_notes(port: int) -> None:
    import socket

    host = socket.gethostname()
    print(
        f"Anyone with this address can read the page; the address is printed only once. Press Ctrl-C to stop.\n"
        f"From another machine, run `ssh -N -L {port}:127.0.0.1:{port} {host}` and open the address there.",
        file=sys.stderr,
        flush=True,
    )
