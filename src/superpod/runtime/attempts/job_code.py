"""The code of a Slurm job, which is unpacked on the first node and copied to a folder that all nodes can access.

Both folders are created with mode 0700 by mkdir, which fails if the name exists. Therefore no other user can put files
there, and no attempt executes the files of an earlier one. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

FOLDER = "SUPERPOD_CODE"
"""The environment variable with the path of that folder."""

PLACE = "{code}"
"""The placeholder for that folder in the commands of the batch script."""

PREFIX = "code."
"""RUN/code.XXXXXXXX: the code of the newest attempt."""


def move_to_run(source: Path, run: Path) -> Path:
    """Move the unpacked code to a new folder in the run folder, and remove the code of earlier attempts.

    Afterwards, this process and its children import the code from there. The caller holds the run's lock. Raises
    OSError.
    """
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=run))
    try:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        # Nobody else may put files where the ranks import from.
        folder.chmod(0o700)  # copytree has copied the mode of `source`
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    for earlier in run.glob(f"{PREFIX}*"):
        if earlier != folder:
            shutil.rmtree(earlier, ignore_errors=True)
    for name, module in list(sys.modules.items()):  # redirect later imports of this package's modules
        is_ours = name.partition(".")[0] == "superpod"  # reading __path__ of other modules may run their code
        if is_ours and str(source.joinpath(*name.split("."))) in getattr(module, "__path__", ()):
            module.__path__ = [str(folder.joinpath(*name.split(".")))]
    # Jobs submitted by this one inherit PYTHONPATH. An empty entry would mean the current folder.
    inherited_paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    kept_paths = [path for path in inherited_paths if path and not path.startswith(f"{run}/{PREFIX}")]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *kept_paths])
    os.environ[FOLDER] = str(folder)
    shutil.rmtree(source, ignore_errors=True)
    return folder


def path_for_nodes(name: str) -> str:
    """Return a path that all nodes can access of a file in the package, such as "runtime/attempts/attempt.py"."""
    folder = os.environ.get(FOLDER)
    package = Path(folder) / "superpod" if folder else Path(__file__).absolute().parents[2]
    return str(package / name)


def insert_folder(command: list[str], folder: Path) -> list[str]:
    """Replace PLACE with the folder in a command of the batch script."""
    return [word.replace(PLACE, str(folder)) for word in command]
