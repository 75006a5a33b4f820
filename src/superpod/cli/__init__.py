"""Entry point and exit codes of the program `recipes`. Its commands are registered in `app.py`."""

from __future__ import annotations

import os
import sys

try:  # the user may press Ctrl-C during these imports, before any handler is installed
    import contextlib
    import errno
    import select
    import signal

    from superpod.cli import streams
    from superpod.common import cpu_threads
    from superpod.errors import UserError, readable
    from superpod.launch.display.exits import INTERRUPTED, exit_interrupted
except KeyboardInterrupt:
    print("error: interrupted", file=sys.stderr, flush=True)
    os._exit(130)

PATH_ERRORS = {
    getattr(errno, name) for name in ("EACCES", "EPERM", "EROFS", "ENOTDIR", "EISDIR", "ENAMETOOLONG", "ELOOP")
}
"""Error numbers that indicate a wrong path or missing permissions, which the user can correct."""


def main() -> None:
    """Run the command line and exit. A traceback is printed only if SUPERPOD_DEBUG is set.

    Exit codes: 0 success, 1 failure, 2 user error, 129 after SIGHUP, 130 after SIGINT (Ctrl-C), 143 after SIGTERM.
    """
    _install_stop_handlers()
    readers = _poll_output_readers()
    try:
        try:
            streams.prepare()
            cpu_threads.set_passive_waiting()  # before torch is imported
            from superpod.cli.app import app  # imported here so that Ctrl-C during the import is handled below

            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # inside the try, so that a closed pipe is handled below
    except UserError as error:
        _print_error(str(error), error.hint)
        sys.exit(2)
    except KeyboardInterrupt:
        exit_interrupted()
    except Stopped as stopped:
        with contextlib.suppress(OSError):  # the terminal may be closed
            print(stopped.message, file=sys.stderr, flush=True)
        raise
    except SystemExit as end:
        if end.code == INTERRUPTED:  # Typer turns KeyboardInterrupt into this exit code and prints nothing
            exit_interrupted()
        if isinstance(end.__context__, BrokenPipeError):  # Typer turns BrokenPipeError into exit code 1
            sys.exit(_broken_pipe_exit_code(end.__context__, readers))
        raise
    except BrokenPipeError as error:
        sys.exit(_broken_pipe_exit_code(error, readers))
    except Exception as error:
        code = error.exit_code if isinstance(error, RunNotDone) else _report_unexpected(error)
        _discard_unwritten_output()
        sys.exit(code)


def _poll_output_readers() -> select.poll:
    """Return a poll object that reports when the readers of stdout and stderr have closed their pipes.

    It watches duplicates of the descriptors, because rich replaces a closed stdout by /dev/null.
    """
    readers = select.poll()
    for number in (1, 2):
        with contextlib.suppress(OSError):  # the stream was closed before the command started
            readers.register(os.dup(number), 0)
    return readers


def _broken_pipe_exit_code(error: BrokenPipeError, readers: select.poll) -> int:
    """Return the exit code after a write to a closed pipe.

    A reader that closes stdout early, such as `| head -1`, is not an error: the command keeps its exit code, or exits
    with 0. Any other broken pipe, such as one to a child process, is reported like an internal error.
    """
    reader_closed = any(event & (select.POLLERR | select.POLLHUP) for _, event in readers.poll(0))
    _discard_unwritten_output()
    if not reader_closed:
        return _report_unexpected(error)
    earlier_exit = error.__context__  # set if the pipe broke in the last flush, after the command had exited
    if isinstance(earlier_exit, SystemExit) and isinstance(earlier_exit.code, int):
        return earlier_exit.code
    return 0


def _discard_unwritten_output() -> None:
    """Redirect stdout to /dev/null if flushing fails, so that Python's own flush at exit does not exit with 120."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            # Python flushes stdout once more at exit, which then succeeds.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class Stopped(SystemExit):
    """Raised when SIGTERM or SIGHUP terminates the command."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        command = next((word for word in sys.argv[1:] if word.isalpha()), "")  # other arguments may contain a secret
        self.message = f"error: {f'recipes {command}'.rstrip()} was terminated by {signal.Signals(number).name}"


class RunNotDone(Exception):
    """Raised after the report of a run that did not end in the state "done"; `main` exits with `exit_code`."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def _install_stop_handlers() -> None:
    """Raise `Stopped` on SIGTERM and SIGHUP, so that `finally` blocks run; the same signal again kills the process."""

    def stop(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise Stopped(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # under nohup, SIGHUP is ignored and must remain so
            signal.signal(number, stop)


def _report_unexpected(error: Exception) -> int:
    """Print an exception that the command did not handle, and return the exit code: 2 for a user error, else 1.

    The traceback of an internal error is saved to a file, or printed if SUPERPOD_DEBUG is set.
    """
    import traceback

    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        location = error.filename or "while writing"
        _print_error(f"{error.strerror} ({location})", "free some disk space, then run the command again")
        return 1
    if isinstance(error, ModuleNotFoundError) and _report_missing_nemo(error):
        return 2
    if os.environ.get("SUPERPOD_DEBUG"):
        traceback.print_exception(error)
        return 1
    if isinstance(error, OSError) and error.errno in PATH_ERRORS and error.filename:
        _print_error(f"{error.filename}: {error.strerror}", "use a path that you have permission to read or write")
        return 2
    report_internal_error(error)
    return 1


def report_internal_error(error: BaseException) -> None:
    """Print an internal error on stderr, and save its traceback to a file."""
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="recipes-", suffix=".log", delete=False) as log:
        traceback.print_exception(error, file=log)
    _print_error(f"internal error: {type(error).__name__}: {error}", f"report it with the traceback in {log.name}")


def _report_missing_nemo(error: ModuleNotFoundError) -> bool:
    """If NeMo or a dependency is not installed, print how to install it and return True; otherwise return False."""
    from superpod.collection import installed

    if not installed.missing_package() or (error.name or "").startswith("superpod"):
        return False
    _print_error(f"this command needs NeMo and its dependencies; {error.name} is not installed", installed.INSTALL)
    return True


def _print_error(message: str, hint: str) -> None:
    # Messages may quote files of other programs: `readable` replaces their control characters.
    print(readable(f"error: {message}"), file=sys.stderr)
    if hint:
        print(readable(f"  next: {hint}"), file=sys.stderr)
