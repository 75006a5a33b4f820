"""Call a function in a separate process, since NeMo does not release process groups and memory.

Without a GPU, the process is forked from this one, which has already imported NeMo. With a GPU, a new process is
started, since CUDA cannot be used after a fork.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from superpod.common import atomic_file, locks, progress_file
from superpod.errors import UserError
from superpod.runtime.processes import watchdog
from superpod.runtime.processes.attempt_processes import kill_group, send
from superpod.runtime.processes.forked import fork

CLEANUP_S = 5.0
"""Seconds that an interrupted call may take to remove incomplete files."""


class SubprocessFailed(RuntimeError):
    """The process of a call failed; the message contains its error."""


def call(function: str, log: Path, /, **arguments: object) -> Any:
    """Call `function` ("module:function") with JSON arguments in a separate process; return its JSON result.

    The process writes its output to `log`.

    Raises:
        UserError: the function raised it.
        SubprocessFailed: the function raised another exception, or the process was killed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    result_file = log.with_suffix(".json")
    # The result of an earlier call would be mistaken for that of a process that fails now.
    result_file.unlink(missing_ok=True)
    request = json.dumps({"function": function, "arguments": arguments, "answer": str(result_file)}, default=str)
    code = _run_forked(request, log) if _can_fork() else _run_new_process(request, log)
    try:
        outcome = json.loads(result_file.read_bytes())
        result_file.unlink()
    except (OSError, ValueError):
        outcome = {"failed": f"exit code {code}"}
    if "refused" in outcome:
        raise UserError(*outcome["refused"])
    if "failed" in outcome:
        raise SubprocessFailed(f"{function.partition(':')[2]} failed: {outcome['failed']}; see {log}")
    return outcome["value"]


def call_once(function: str, /, **arguments: object) -> Any:
    """Call a function like `call`, with a temporary log that is kept only if the process fails."""
    folder = Path(tempfile.mkdtemp(prefix="recipes-call-"))
    keep = False
    try:
        return call(function, folder / "log", **arguments)
    except SubprocessFailed:
        keep = True
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _can_fork() -> bool:
    """Return whether a fork works (without CUDA) and saves time (NeMo is imported)."""
    torch: Any = sys.modules.get("torch")
    return "nemo.collections.llm" in sys.modules and not torch.cuda.is_available()


def _run_forked(request: str, log: Path) -> int:
    """Handle the request in a forked process and return its exit code."""
    with watchdog.run_watchdog() as call_watchdog:
        return _wait(fork(lambda: _call_in_fork(request, log)), call_watchdog)


def _wait(pid: int, call_watchdog: watchdog.Watchdog) -> int:
    """Wait for the process of a call and return its exit code.

    If this process is interrupted, the call is stopped; if this process is killed, the watchdog kills the call.
    """
    call_watchdog.add_group(pid)
    _running.append(pid)
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except BaseException:
        _stop(pid)
        raise
    finally:
        _running.remove(pid)


_running: list[int] = []


def stop_running() -> None:
    """Stop the processes of all running calls. Call it before an immediate exit of this process."""
    for pid in _running:
        _stop(pid)


def _stop(pid: int) -> None:
    """Interrupt a call, wait up to CLEANUP_S for it to remove incomplete files, then kill its process group."""
    send([pid], signal.SIGINT)
    deadline = time.monotonic() + CLEANUP_S
    with contextlib.suppress(ChildProcessError):  # it exited before the signal
        while not os.waitpid(pid, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                kill_group(pid)
            time.sleep(0.05)
    kill_group(pid)


def _call_in_fork(request: str, log: Path) -> None:
    """Handle the request in the forked process, in a new session, which signals of the terminal do not reach."""
    os.setsid()
    _close_run_lock()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # KeyboardInterrupt removes temporary folders
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(sink, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    _execute(request)


def _close_run_lock() -> None:
    """Close the inherited lock of the run, so that the kernel releases it when the parent exits."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if entry.readlink().name == locks.LAUNCHER:
                os.close(int(entry.name))


def _run_new_process(request: str, log: Path) -> int:
    """Handle the request in a new process and return its exit code."""
    with log.open("ab") as sink:
        command = [sys.executable, "-P", "-m", __name__]  # -P: import nothing from the current folder
        with watchdog.run_watchdog() as call_watchdog, tempfile.TemporaryFile() as stdin:
            stdin.write(request.encode())
            stdin.seek(0)
            process = subprocess.Popen(command, stdin=stdin, stdout=sink, stderr=sink, start_new_session=True)
            process.returncode = _wait(process.pid, call_watchdog)
            return process.returncode


def _execute(request: str) -> None:
    """Call the function of a request, and write its result or error to the file that the request names."""
    from superpod.rehearsal import install

    call = json.loads(request)
    module, _, name = call["function"].partition(":")
    try:
        progress_file.note("importing NeMo")
        install()
        function = getattr(importlib.import_module(module), name)
        progress_file.note("working")
        outcome = {"value": function(**call["arguments"])}
    except UserError as refused:
        outcome = {"refused": [str(refused), refused.hint]}
    except Exception as error:
        traceback.print_exc()
        outcome = {"failed": f"{type(error).__name__}: {str(error)[:500]}"}
    for child in multiprocessing.active_children():  # Megatron's checkpoint writers outlive their parent
        child.kill()
    atomic_file.write(Path(call["answer"]), json.dumps(outcome, default=str))


if __name__ == "__main__":  # checkpoint writers import this file again
    _execute(sys.stdin.read())
