"""Rehearses a user's Python script: `torchrun --nproc-per-node N -m superpod.rehearsal.script FILE`.

Each process is one rank. It installs the patches, then runs FILE as `__main__`. In FILE, `import superpod` fails, as
on a machine without this project. The recipe that FILE passes to `nemo_run.run` is rehearsed on CPUs. This shows,
without a GPU, that a file from `recipes export` needs only NeMo.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import nemo_run as run

PROJECT = "superpod"


class _ProjectBlocker(MetaPathFinder):
    """Raises ModuleNotFoundError for every import of this project."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname.partition(".")[0] == PROJECT:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


@contextmanager
def block_project_imports() -> Iterator[None]:
    """Prevent imports of this project within the block; modules that were imported before keep working."""
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == PROJECT}
    finder = _ProjectBlocker()
    for name in modules:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.modules.update(modules)


def main(path: str, *arguments: str) -> None:
    """Run the Python script at `path` with its command-line arguments, as one rank of a rehearsal."""
    import nemo_run

    from superpod.errors import counted
    from superpod.rehearsal import install, rehearse

    install()
    real_run, blocker = nemo_run.run, ExitStack()

    def run_rehearsed(recipe: run.Partial, *args: Any, **kwargs: Any) -> None:
        blocker.close()  # the script has created its recipe; the rehearsal needs this project
        rehearsal, changes = rehearse(recipe, devices=int(os.environ["WORLD_SIZE"]))
        if os.environ["RANK"] == "0":
            print(f"rehearsing on CPUs: changed {counted(len(changes), 'setting')} of the recipe", flush=True)
        real_run(rehearsal, *args, **kwargs)

    nemo_run.run = run_rehearsed
    sys.argv = [path, *arguments]
    with blocker:
        blocker.enter_context(block_project_imports())
        runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
