"""The command `recipes`: its entry point and its exit codes. The verbs are in `app.py`."""

from __future__ import annotations

import os
import sys

try:  # Ctrl-C may come while these are imported, and they are the first of ours
    import contextlib
    import errno
    import select
    import signal

    from superpod.cli import streams
    from superpod.cli.exits import INTERRUPTED, leave_interrupted
    from superpod.common import cpu_threads
    from superpod.errors import UserError, readable
except KeyboardInterrupt:
    print("error: interrupted", file=sys.stderr, flush=True)
    os._exit(130)

OF_A_PATH = {
    getattr(errno, name) for name in ("EACCES", "EPERM", "EROFS", "ENOTDIR", "EISDIR", "ENAMETOOLONG", "ELOOP")
}
"""What a file system says of a path that a user gave, or of a folder without permission for him."""


def main() -> None:
    """Entry point; no tracebacks.

    Exit codes: 0 done, 2 the user's mistake, 1 a failure, 130 interrupted, 143 and 129 ended by SIGTERM and SIGHUP.
    """
    _raise_at_stops()
    readers = _readers()
    try:
        try:
            streams.prepare()
            cpu_threads.wait_passively()  # before torch is imported
            from superpod.cli.app import app  # imported here, so that Ctrl-C during the import is handled too

            app()
        finally:
            if sys.stdout is not None:  # flushed inside the try: a reader that closed the pipe is handled below
                sys.stdout.flush()
    except UserError as error:
        _print_error(str(error), error.hint)
        sys.exit(2)
    except KeyboardInterrupt:
        leave_interrupted()
    except Stopped as stopped:
        with contextlib.suppress(OSError):  # the terminal may be closed
            print(stopped.words, file=sys.stderr, flush=True)
        raise
    except SystemExit as end:
        if end.code == INTERRUPTED:  # Typer turns KeyboardInterrupt into this exit and prints nothing
            leave_interrupted()
        if isinstance(end.__context__, BrokenPipeError):  # and this error into exit 1
            sys.exit(_code_of_broken_pipe(end.__context__, readers))
        raise
    except BrokenPipeError as error:
        sys.exit(_code_of_broken_pipe(error, readers))
    except Exception as error:
        code = _exit_code(error)
        _drop_unwritten()
        sys.exit(code)


def _readers() -> select.poll:
    """The readers of stdout and stderr; of duplicates, because rich replaces a closed stdout by /dev/null."""
    readers = select.poll()
    for number in (1, 2):
        with contextlib.suppress(OSError):  # closed from the start
            readers.register(os.dup(number), 0)
    return readers


def _code_of_broken_pipe(error: BrokenPipeError, readers: select.poll) -> int:
    """The exit code after `| head -1` has closed the pipe, which is not an error: the command's own code, or 0."""
    has_left = any(event & (select.POLLERR | select.POLLHUP) for _, event in readers.poll(0))
    _drop_unwritten()
    if not has_left:  # another pipe broke, such as one to a child process
        return _unexpected(error)
    found = error.__context__  # flushed at its end, a command has its code already
    return found.code if isinstance(found, SystemExit) and isinstance(found.code, int) else 0


def _drop_unwritten() -> None:
    """Python flushes stdout once more at exit, which would end in code 120; into /dev/null that cannot fail."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class Stopped(SystemExit):
    """A signal has come that ends the command."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        verb = next((word for word in sys.argv[1:] if word.isalpha()), "")  # no more of it: it may hold a secret
        self.words = f"error: {signal.Signals(number).name} has ended recipes {verb}".rstrip()


def _raise_at_stops() -> None:
    """Let `kill` and a closed terminal leave through every `finally`, as Ctrl-C does; a second signal ends at once."""

    def leave(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise Stopped(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # not where it is ignored, as under nohup
            signal.signal(number, leave)


def _exit_code(error: Exception) -> int:
    from superpod.cli.running.training import NotDone

    return error.exit_code if isinstance(error, NotDone) else _unexpected(error)


def _unexpected(error: Exception) -> int:
    """Report our own failure in one line, and write the traceback to a file; returns the exit code."""
    import tempfile
    import traceback

    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        _print_error(f"{error.strerror} ({error.filename or 'while writing'})", "make room, then run this again")
        return 1
    if isinstance(error, ModuleNotFoundError) and _without_nemo(error):
        return 2
    if os.environ.get("SUPERPOD_DEBUG"):
        traceback.print_exception(error)
        return 1
    if isinstance(error, OSError) and error.errno in OF_A_PATH and error.filename:
        _print_error(f"{error.filename}: {error.strerror}", "give a path that you may read or write")
        return 2
    with tempfile.NamedTemporaryFile("w", prefix="recipes-", suffix=".log", delete=False) as log:
        traceback.print_exception(error, file=log)
    _print_error(f"this is our failure, not yours: {type(error).__name__}: {error}", f"the traceback is in {log.name}")
    return 1


def _without_nemo(error: ModuleNotFoundError) -> bool:
    """Whether the command has met the base install, which has no NeMo; then that is said."""
    from superpod.collection import installed

    if not installed.missing() or (error.name or "").startswith("superpod"):
        return False
    _print_error(f"this needs NeMo and what comes with it, and {error.name} is not installed", installed.INSTALL)
    return True


def _print_error(message: str, hint: str) -> None:
    """Files of others may be cited: their codes steer no terminal here."""
    print(readable(f"error: {message}"), file=sys.stderr)
    if hint:
        print(readable(f"  next: {hint}"), file=sys.stderr)
