"""Runs the command `recipes` in a fork of a process that has already imported its modules.

Importing NeMo takes 15 s, and the light modules half a second. `Server` starts the process; each call forks it, so that
no command sees what another has left behind. Run as a script it is the process itself: a request is a JSON line on
stdin, the answer an exit code on stdout.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, cast

STARTED = "ready"


class Server:
    """The process that has imported NeMo, or only the light modules; it is started at the first call."""

    def __init__(self, modules: str, env: Mapping[str, str]) -> None:
        """`modules`: nemo or light. `env`: the environment in which they are imported, whatever a call has."""
        self._modules, self._env = modules, env
        self._process: subprocess.Popen[str] | None = None

    def call(
        self, words: list[str], cwd: Path | None, env: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command and return it like `subprocess.run`, with text output."""
        self._process = self._process or _start(self._modules, self._env)
        with tempfile.TemporaryDirectory() as folder:
            pipes = {"out": Path(folder, "out"), "err": Path(folder, "err")}
            for path in pipes.values():
                os.mkfifo(path)
            request = {"words": words, "cwd": str(cwd or Path.cwd()), "env": dict(env), "limit_s": timeout}
            request |= {name: str(path) for name, path in pipes.items()}
            print(json.dumps(request), file=self._process.stdin, flush=True)
            with ThreadPoolExecutor(2) as readers:
                out, err = readers.map(Path.read_text, pipes.values())
            code = int(cast(IO[str], self._process.stdout).readline())
            return subprocess.CompletedProcess(words, code, out, err)

    def close(self) -> None:
        """End the process if it was started."""
        if self._process is not None:
            self._process.communicate(timeout=60)


def _start(modules: str, env: Mapping[str, str]) -> subprocess.Popen[str]:
    # -P: tests/requests is not the package requests. NeMo's own imports warn; a light command must not.
    warnings = ["-W", "ignore"] if modules == "nemo" else []
    command = [sys.executable, "-P", *warnings, __file__, modules]
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert cast(IO[str], process.stdout).readline().strip() == STARTED
    return process


def serve(modules: str) -> None:
    """Import the modules, then answer requests until stdin is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what NeMo prints while it is imported is no answer
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.devnull)
    if modules == "nemo":
        import superpod.nemo2.build.partial  # noqa: F401
    else:
        _import_light_modules()

    print(STARTED, file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if not (child := os.fork()):
            _run(request)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


def _import_light_modules() -> None:
    """Import what commands without NeMo import: the subcommands, and the planner's modules with numpy."""
    import superpod.cli
    import superpod.planner

    for package in (superpod.cli, superpod.planner):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    heavy = {"torch", "nemo", "megatron", "nemo_run", "lightning"} & set(sys.modules)
    assert not heavy, f"a light command would find {heavy} imported"


def _run(request: dict) -> None:
    """Run the command in its folder and environment; never returns."""
    for number, path in ((1, request["out"]), (2, request["err"])):
        os.dup2(os.open(path, os.O_WRONLY), number)
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
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
