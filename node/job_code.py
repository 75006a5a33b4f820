"""The code of a Slurm job: its batch script unpacks it on the first node; from there it goes where all nodes see it.

Both folders are new, with mode 0700: mkdir makes them, and fails where anything of that name exists. So nobody else
can have put a file there, whatever they have made beforehand, and no attempt executes what an earlier one has left.
Standard library only.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

FOLDER = "SUPERPOD_CODE"
"""The variable that names the folder which all nodes see."""

PLACE = "{code}"
"""Stands for that folder in the commands of the batch script, which is written before there is one."""

PREFIX = "code."
"""RUN/code.XXXXXXXX: the code of the newest attempt."""


def share(unpacked: Path, run: Path) -> Path:
    """Move the unpacked code into a new folder of the run, in place of those of earlier attempts; under the run's lock.

    This process, and those that it starts, find the code there from now on. Raises OSError.
    """
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=run))
    try:
        shutil.copytree(unpacked, folder, dirs_exist_ok=True)
        folder.chmod(0o700)  # copytree has given it the rights of the other
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    for earlier in run.glob(f"{PREFIX}*"):
        if earlier != folder:
            shutil.rmtree(earlier, ignore_errors=True)
    for name, module in list(sys.modules.items()):  # where our packages look for what is still to be imported
        is_ours = name.partition(".")[0] == "superpod"  # others may do anything when they are asked for their path
        if is_ours and str(unpacked.joinpath(*name.split("."))) in getattr(module, "__path__", ()):
            module.__path__ = [str(folder.joinpath(*name.split(".")))]
    # Of a job that submits the next one, that one inherits the path; an empty entry would be the current folder.
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept = [path for path in inherited if path and not path.startswith(f"{run}/{PREFIX}")]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *kept])
    os.environ[FOLDER] = str(folder)
    shutil.rmtree(unpacked, ignore_errors=True)
    return folder


def for_nodes(name: str) -> str:
    """A file of the package, such as "node/leftovers.py", by a path that every node of the job sees."""
    folder = os.environ.get(FOLDER)
    package = Path(folder) / "superpod" if folder else Path(__file__).absolute().parents[1]
    return str(package / name)


def in_place(command: list[str], folder: Path) -> list[str]:
    """A command of the batch script with the folder where it is named."""
    return [word.replace(PLACE, str(folder)) for word in command]
