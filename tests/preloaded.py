"""Runs the command `recipes` in a fork of a process that has imported NeMo, which saves 15 s.

`Server` starts that process; each call forks it, so that no command sees what another has left behind. Run as a script
it is the process itself: a request is a JSON line on stdin, the answer an exit code on stdout.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, cast

STARTED = "ready"


class Server:
    """The process that has imported NeMo; it is started at the first call."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def call(
        self, words: list[str], cwd: Path | None, env: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command and return it like `subprocess.run`, with text output."""
        self._process = self._process or _start()
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            request = {"words": words, "cwd": str(cwd or Path.cwd()), "env": dict(env), "limit_s": timeout}
            print(json.dumps(request | {"out": str(out), "err": str(err)}), file=self._process.stdin, flush=True)
            code = int(cast(IO[str], self._process.stdout).readline())
            return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())

    def close(self) -> None:
        """End the process if it was started."""
        if self._process is not None:
            self._process.communicate(timeout=60)


def _start() -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-W", "ignore", __file__]  # -P: tests/requests is not the package requests
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert cast(IO[str], process.stdout).readline().strip() == STARTED
    return process


def serve() -> None:
    """Import NeMo, then answer requests until stdin is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what NeMo prints while it is imported is no answer
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.devnull)
    import superpod.nemo2.build.partial  # noqa: F401

    print(STARTED, file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if not (child := os.fork()):
            _run(request)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


def _run(request: dict) -> None:
    """Run the command in its folder and environment; never returns."""
    for number, path in ((1, request["out"]), (2, request["err"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = ["recipes", *request["words"]]
    signal.alarm(int(request["limit_s"]))
    from superpod.cli import main

    code = 1
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
