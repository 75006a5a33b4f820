import contextlib
import os
import subprocess
from pathlib import Path

import pytest

from superpod.launchers.rundir import RunDir

NAME = "tiny_pretrain_h100_bf16"


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path / "runs", NAME, facts={"seed": 7}, recipe_lines=["a = 1", "b = 2"])


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 512 KiB."""
    if os.geteuid():
        pytest.skip("mounting a small tmpfs needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", disk], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no small tmpfs: {made.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill(disk: Path, name: str = "filler") -> None:
    with contextlib.suppress(OSError), open(disk / name, "ab", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
