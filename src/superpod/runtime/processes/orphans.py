"""Ends what a command has started when the command itself is killed: a small process beside it watches over them.

kill -9 lets no handler of the command run, and what it started would go on for hours: torchrun, ranks, their data
workers and checkpoint writers, a conversion. The watcher is in a session of its own, so that neither Ctrl-C, nor a
closed terminal, nor a signal to the command's group ends it. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from superpod.errors import UserError

START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from superpod.runtime.processes import orphans; orphans.start()"
)

MARK = "SUPERPOD_ATTEMPT_DIR"
"""In the environment of every process of an attempt, so that none is left behind."""

LOOK_S = 0.5
"""Seconds between two looks at the command."""
pids: set[int] = set()
"""Of the watchers that this process has started: they are no children that anybody waits for."""

SAVE_S = 30
"""How long the ranks of a killed launcher may take to save and end, seconds; then they are killed."""


class Watcher:
    """The process that ends groups of processes, and those of an attempt, once this process is gone."""

    def __init__(self, attempt: Path | None = None) -> None:
        home = str(Path(__file__).absolute().parents[3])  # -I: nothing where the command was typed is imported
        command = [sys.executable, "-I", "-c", START, home, str(os.getpid()), str(attempt or "")]
        environ = {name: value for name, value in os.environ.items() if name != MARK}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environ,
            cwd="/",
            start_new_session=True,
        )
        pids.add(self._process.pid)

    def add_group(self, leader: int) -> None:
        """Watch over the process group (or session) that this process leads, too."""
        pipe = self._process.stdin
        with contextlib.suppress(OSError, ValueError):
            if pipe:
                pipe.write(f"{leader}\n".encode())
                pipe.flush()

    def close(self) -> None:
        """All has ended: nothing is left to watch over."""
        self._process.kill()
        self._process.wait()
        pids.discard(self._process.pid)
        if self._process.stdin:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


@contextlib.contextmanager
def watched(attempt: Path | None = None) -> Iterator[Watcher]:
    """A `Watcher` while the block runs."""
    watcher = Watcher(attempt)
    try:
        yield watcher
    finally:
        watcher.close()


def marked(path: Path) -> dict[int, dict[str, str]]:
    """Processes of this machine that belong to an attempt, or to any attempt of a run: {pid: environment}."""
    belonging = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            environ = _environ(folder)
            mark = environ.get(MARK)
            inside = mark and (Path(mark) == path or path in Path(mark).parents)
            if inside and int(folder.name) != os.getpid() and _state(folder) != "Z":
                belonging[int(folder.name)] = environ
    return belonging


def words_of(path: Path) -> str:
    """'pids 12, 13 and 14 on host a': the processes of a run, for the user who wants to stop them; '' for none."""
    pids = [str(pid) for pid in sorted(marked(path))]
    if not pids:
        return ""
    listed = f"pid {pids[0]}" if len(pids) == 1 else f"pids {', '.join(pids[:-1])} and {pids[-1]}"
    return f"{listed} on host {socket.gethostname()}"


def stop_words(path: Path) -> str:
    """The command that stops them."""
    return f"kill {' '.join(str(pid) for pid in sorted(marked(path)))}"


def still_running(run: Path, attempt: str) -> UserError:
    """Ranks of an attempt hold their run, and no launcher does."""
    who = words_of(run)
    return UserError(
        f"ranks of attempt {attempt} of {run} still run{f', {who}' if who else ' on another host'}, "
        "but the process that started them is gone",
        f"they save and end within a minute; at once, without saving: {stop_words(run)}"
        if who
        else "wait until they end, or stop them there",
    )


def _environ(folder: Path) -> dict[str, str]:
    text = (folder / "environ").read_bytes().decode(errors="surrogateescape")
    return {name: value for name, _, value in (item.partition("=") for item in text.split("\0") if item)}


def _state(folder: Path) -> str:
    return (folder / "stat").read_text().rpartition(")")[2].split()[0]


# -- in the watcher --------------------------------------------------------------------------------------------------


def main(command: int, attempt: Path | None) -> None:
    """Wait until the process `command` is gone, then end what it left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    leaders = _leaders_until_gone(command)
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
    if attempt and attempt.is_dir():
        when = time.time()
        _end_attempt(attempt)
        _record(attempt, command, when)


def _leaders_until_gone(command: int) -> list[int]:
    """What stdin names until the parent is another one."""
    leaders: list[int] = []
    pipe, text = sys.stdin.fileno(), b""
    is_open = True
    while True:
        gone = os.getppid() != command  # looked at before the pipe is read: nothing that it names is missed
        while is_open and select.select([pipe], [], [], 0 if gone else LOOK_S)[0]:
            piece = os.read(pipe, 4096)
            is_open, text = bool(piece), text + piece
        *lines, text = text.split(b"\n")
        leaders += [int(line) for line in lines]
        if gone:
            return leaders
        if not is_open:
            time.sleep(LOOK_S)


def _end_attempt(attempt: Path) -> None:
    """Let the ranks save and end, as after a first Ctrl-C, for SAVE_S; then kill all that is left."""
    processes = marked(attempt)
    ranks = [pid for pid, environ in processes.items() if "RANK" in environ and _is_rank(pid, processes)]
    for pid in ranks:
        _send(pid, signal.SIGTERM)
    deadline = time.monotonic() + SAVE_S
    while time.monotonic() < deadline and marked(attempt).keys() & {*ranks}:
        time.sleep(LOOK_S)
    for _ in range(20):  # what is killed may have started another just before
        if not (processes := marked(attempt)):
            return
        for pid in processes:
            _send(pid, signal.SIGKILL)
        time.sleep(LOOK_S)


def _is_rank(pid: int, processes: dict[int, dict[str, str]]) -> bool:
    """Whether torchrun started it: its parent is no rank. Data workers and checkpoint writers are children of ranks."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return False
    return "RANK" not in processes.get(parent, {})


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _record(attempt: Path, command: int, when: float) -> None:
    """Write into the attempt how it ended, where nothing else has."""
    from superpod.common.files import write_json
    from superpod.runtime.runs import pending_facts
    from superpod.runtime.runs.run_folder import Attempt, RunFolder, as_user_errors

    this, run = Attempt(attempt), RunFolder(attempt.parents[1])
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(when))
    words = f"its launcher, pid {command} on host {socket.gethostname()}, was killed at {at}"
    if "ended" in this.result:  # while it exported
        with as_user_errors(attempt):
            write_json(attempt / "result.json", {**this.result, "killed": words})
        return
    pending_facts.take_over(run)
    beats = this.heartbeat()
    saved = ", and its ranks saved a checkpoint first" if beats.get("checkpoint") else ""
    message = "" if run.done else f"{words}{saved}; {run.resume_hint}"
    this.finish("done" if run.done else "failed", message=message, killed=words, last_step=beats.get("step"))


def start() -> None:
    """`main`, with what the command line of the watcher says."""
    main(int(sys.argv[1]), Path(sys.argv[2]) if sys.argv[2] else None)
