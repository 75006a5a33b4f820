"""Run a function in a forked process, which shares the modules imported by this process. Standard library only."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable


def fork(call: Callable[[], object]) -> int:
    """Run `call` in a forked process and return its pid.

    The process exits with 0, or with 1 after printing the traceback if `call` raises. It runs no exit handlers of this
    process and does not return to its stack.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        call()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def redirect_output(log: str | os.PathLike[str]) -> None:
    """Redirect stdout and stderr of this process to the file `log`, which is truncated, and stdin from /dev/null."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
