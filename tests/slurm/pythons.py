"""The installed Python interpreters by version: pyenv's, or those on the PATH."""

import re
import shutil
import subprocess
from pathlib import Path

WANTED = ("3.9", "3.10", "3.11", "3.12", "3.13")
"""3.9 is RHEL 9's, 3.10 that of Ubuntu 22.04, which DGX OS 6 is, 3.12 that of Ubuntu 24.04 and of DGX OS 7."""

TOO_OLD = ("2.7", "3.6", "3.7", "3.8")
"""3.6 is RHEL 8's `python3`, 3.8 that of Ubuntu 20.04, which DGX OS 5 is."""


def find_python(version: str) -> str | None:
    """Find an interpreter of a version; None if there is none, or only a shim of pyenv that starts none."""
    name = f"python{version.partition('.')[0]}"
    installed = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/{name}"))
    path = str(installed[-1]) if installed else shutil.which(f"python{version}")
    return path if path and not subprocess.run([path, "--version"], capture_output=True).returncode else None


def full_version(path: str) -> str:
    """Query the full version of an interpreter."""
    done = subprocess.run([path, "--version"], capture_output=True, text=True)
    return re.sub(r"[^\d.]", "", done.stdout + done.stderr)


INSTALLED = {version: path for version in WANTED for path in [find_python(version)] if path}
OLD = {version: path for version in TOO_OLD for path in [find_python(version)] if path}
