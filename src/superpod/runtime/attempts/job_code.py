"""Move the code of a Slurm job, which is unpacked on the first node, to a folder that all nodes can access.

Both folders are created with mode 0700 by mkdir, which fails if the name exists. Therefore no other user can write
files into them, and no attempt executes the files of an earlier one. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

FOLDER = "SUPERPOD_CODE"
"""Environment variable with the path of the folder that all nodes can access."""

PLACE = "{code}"
"""Placeholder for this folder in the commands of the batch script."""

PREFIX = "code."
"""Prefix of the folder's name, `RUN/code.XXXXXXXX`: the code of the newest attempt."""


def move_to_run(source: Path, run: Path) -> Path:
    """Move the code from `source` to a new folder in `run`, remove the code of earlier attempts, and return the folder.

    Afterwards, this process and its children import the code from the new folder. The caller holds the run's lock.
    Raises OSError.
    """
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=run))
    try:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        # No other user may write into a folder from which the ranks import.
        folder.chmod(0o700)  # copytree has copied the mode of `source`
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    for earlier in run.glob(f"{PREFIX}*"):
        if earlier != folder:
            shutil.rmtree(earlier, ignore_errors=True)
    for name, module in list(sys.modules.items()):  # redirect later imports of this package's modules
        is_own = name.partition(".")[0] == "superpod"  # reading __path__ of other modules may run their code
        if is_own and str(source.joinpath(*name.split("."))) in getattr(module, "__path__", ()):
            module.__path__ = [str(folder.joinpath(*name.split(".")))]
    # Jobs submitted by this one inherit PYTHONPATH. An empty entry would mean the current folder.
    inherited_paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept_paths = [path for path in inherited_paths if path and not path.startswith(f"{run}/{PREFIX}")]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *kept_paths])
    os.environ[FOLDER] = str(folder)
    shutil.rmtree(source, ignore_errors=True)
    return folder


def path_for_nodes(name: str) -> str:
    """Return the path, on all nodes, of a file of this package, such as `name` = "runtime/attempts/attempt.py"."""
    folder = os.environ.get(FOLDER)
    package = Path(folder) / "superpod" if folder else Path(__file__).absolute().parents[2]
    return str(package / name)


def insert_folder(command: list[str], folder: Path) -> list[str]:
    """Return a command of the batch script with each PLACE replaced by `folder`."""
    return [word.replace(PLACE, str(folder)) for word in command]
