"""Rehearse a Python script of somebody's own: `torchrun --nproc-per-node N -m superpod.rehearsal.alone FILE`.

Each process is one rank. It installs the patches, then runs FILE as `__main__` where `import superpod` fails, as it
does on a machine without this project; what FILE gives to `nemo_run.run` is rehearsed: the same recipe on CPUs. This is
how a file of `recipes export` is shown to need NeMo only, on a machine without a GPU.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from typing import Any

OURS = "superpod"


class _NotHere(MetaPathFinder):
    """Finds this project nowhere."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        if fullname.partition(".")[0] == OURS:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


@contextmanager
def hidden() -> Iterator[None]:
    """Inside, this project cannot be imported; what is imported already goes on working."""
    ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == OURS}
    finder = _NotHere()
    for name in ours:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.modules.update(ours)


def main(path: str, *arguments: str) -> None:
    """Run the script at `path`, with its arguments, as this rank of a rehearsal."""
    import nemo_run

    from superpod.rehearsal import install, rehearse

    install()
    real, away = nemo_run.run, ExitStack()

    def rehearsed(recipe: Any, *args: Any, **how: Any) -> None:
        away.close()  # the script has made its recipe
        rehearsal, changes = rehearse(recipe, devices=int(os.environ["WORLD_SIZE"]))
        if os.environ["RANK"] == "0":
            print(f"rehearsal: {len(changes)} settings changed", flush=True)
        real(rehearsal, *args, **how)

    nemo_run.run = rehearsed
    sys.argv = [path, *arguments]
    with away:
        away.enter_context(hidden())
        runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
