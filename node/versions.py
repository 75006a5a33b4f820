"""Versions, commit and machine of a run: what env.json keeps, and which versions are known not to work together."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from superpod.node.files import JsonObject

GIB = 2**30
PROJECT = Path(__file__).resolve().parents[1]

REPORTED = ("torch", "nemo_toolkit", "megatron-core", "nemo_run", "transformer-engine", "lightning", "numpy")

KNOWN_BAD = (
    ("nemo_toolkit", "2.7.", "megatron-core", "0.16", "NeMo 2.7 passes arguments that Megatron-Core 0.16 has dropped"),
    ("nemo_run", "0.11.", "leptonai", "0.4", "NeMo-Run 0.11 does not import with leptonai 0.47; 0.27.3 does"),
)
"""Pairs that are known not to work: package, version, package, version, why."""

SHOWN = ("torch", "nemo_toolkit", "megatron-core", "transformer-engine", "nemo_run", "lightning")


def versions() -> dict[str, str | None]:
    """Versions of Python and of what a run depends on; None for what is not installed."""
    return {"python": platform.python_version(), **{name: version_of(name) for name in REPORTED}}


def commit() -> str | None:
    """This project's git commit, with `+changes` when files differ from it; None outside its git checkout."""
    if not (PROJECT / ".git").exists():
        return None
    head = output_of(["git", "-C", str(PROJECT), "rev-parse", "HEAD"])
    if head is None:
        return None
    return head + ("+changes" if output_of(["git", "-C", str(PROJECT), "status", "--porcelain", "-uno"]) else "")


def machine_facts() -> JsonObject:
    """Versions, commit, command line and machine, as env.json keeps them."""
    from superpod.node.redaction import redact_text

    return {
        "versions": versions(),
        "commit": commit(),
        "command": redact_text(" ".join(sys.argv)),
        "host": socket.gethostname(),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "ram_gib": round(ram_bytes() / GIB, 1),
    }


def bad_pair(version: Mapping[str, str]) -> str:
    """Why these installed versions cannot work together; '' when nothing is known against them."""
    for one, this, other, that, why in KNOWN_BAD:
        if version.get(one, "").startswith(this) and version.get(other, "").startswith(that):
            return f"{one} {version[one]} with {other} {version[other]}: {why}"
    return ""


def installed() -> dict[str, str]:
    """Versions of what SHOWN and KNOWN_BAD name, as far as installed."""
    versions = {}
    for name in {*SHOWN, *(pair[2] for pair in KNOWN_BAD)}:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@cache
def version_of(name: str) -> str | None:
    """Version of an installed distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """The processor's name in /proc/cpuinfo."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.machine()


def usable_cores() -> int:
    """Cores that this process may use: a Slurm or container limit counts."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ram_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def output_of(command: list[str], timeout_s: float = 5) -> str | None:
    """The command's standard output, stripped; None when it cannot run or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
