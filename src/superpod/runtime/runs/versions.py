"""Collect the versions, commit and machine for env.json, and refuse incompatible versions."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import socket
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from superpod.common.json_files import JsonObject
from superpod.runtime.processes.command import output_of
from superpod.runtime.rank import cudnn

GIB = 2**30
PROJECT = Path(__file__).resolve().parents[4]

REPORTED_PACKAGES = ("torch", "nemo_toolkit", "megatron-core", "nemo_run", "transformer-engine", "lightning", "numpy")

KNOWN_BAD = (
    ("nemo_toolkit", "2.7.", "megatron-core", "0.16", "NeMo 2.7 passes arguments that Megatron-Core 0.16 has dropped"),
    ("nemo_run", "0.11.", "leptonai", "0.4", "NeMo-Run 0.11 does not import with leptonai 0.47; 0.27.3 does"),
)
"""Incompatible pairs as (package, version prefix, other package, its version prefix, reason)."""


class Range(NamedTuple):
    """The permitted versions of a package: `least` <= version < `below`."""

    package: str
    least: str
    below: str
    """the first version that is not permitted; "" = no limit"""
    why: str
    """the reason for the limits"""


VERIFIED = (
    Range(
        "nemo_toolkit", "2.7", "2.8", "recipes are written for NeMo 2.7.3, the last series with nemo.collections.llm"
    ),
    Range(
        "megatron-core",
        "0.15",
        "0.16",
        "NeMo 2.7 passes arguments that 0.16 has dropped; recipes are verified with 0.15.3",
    ),
    Range("transformer-engine", "2.9", "2.10", "required by megatron-core 0.15.3; recipes are verified with it"),
)
"""The versions with which the recipes are verified. On a GPU, all of these packages are required."""

IGNORE = "SUPERPOD_UNPROVEN_VERSIONS"
"""Environment variable: with 1 in a profile's [env], versions outside `VERIFIED` are reported but accepted."""

SHOWN_PACKAGES = ("torch", "nemo_toolkit", "megatron-core", "transformer-engine", "nemo_run", "lightning")


def versions() -> dict[str, str | None]:
    """Return the version of Python and of each package in REPORTED_PACKAGES; None if it is not installed."""
    return {"python": platform.python_version(), **{name: version_of(name) for name in REPORTED_PACKAGES}}


def commit() -> str | None:
    """Return the git commit of this project, with `+changes` if tracked files differ; None outside a git checkout."""
    if not (PROJECT / ".git").exists():
        return None
    head = output_of(["git", "-C", str(PROJECT), "rev-parse", "HEAD"])
    if head is None:
        return None
    changes = output_of(["git", "-C", str(PROJECT), "status", "--porcelain", "-uno"])
    return f"{head}+changes" if changes else head


def machine_facts() -> JsonObject:
    """Return the versions, commit, command line and hardware of this machine as the JSON object for env.json."""
    from superpod.common.redaction import redact_text

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
    """Return the reason why the installed versions (package -> version) are incompatible; '' if none is known."""
    for one, this, other, that, why in KNOWN_BAD:
        if version.get(one, "").startswith(this) and version.get(other, "").startswith(that):
            return f"{one} {version[one]} with {other} {version[other]}: {why}"
    return ""


def find_violations(
    version: Mapping[str, str], ranges: Iterable[Range] = VERIFIED, *, on_gpu: bool = True
) -> list[str]:
    """Return a message for each package outside its range, and with `on_gpu` for each missing package."""
    problems = []
    for package, least, below, why in ranges:
        limits = f"{least} or later, below {below}" if below else f"{least} or later"
        installed = version.get(package)
        if installed is None:
            if on_gpu:
                problems.append(f"{package} is missing, but must be {limits}: {why}")
        elif release_numbers(installed) < release_numbers(least) or (
            below and release_numbers(installed) >= release_numbers(below)
        ):
            problems.append(f"{package} is {installed}, but must be {limits}: {why}")
    return problems


def release_numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version without suffix and trailing zeros: 2.9.0+70f5366 is (2, 9), 0.16.0rc0 (0, 16)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    parts = [int(part) for part in match[0].split(".")] if match else []
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def requirements_of(facts: Mapping[str, object]) -> list[Range]:
    """Return the requirements of a run in addition to `VERIFIED`, from `needs` in its run.json, `facts`."""
    rows = facts.get("needs")
    if not isinstance(rows, list):
        return []
    return [Range(*map(str, row)) for row in rows if len(row) == len(Range._fields)]


UNSEEN_AT_TIMES = (cudnn.NAME, "triton")
"""Packages that may be installed although `installed_versions` does not find them: torch finds cuDNN itself, and images
may contain Triton under another name, such as pytorch-triton."""

IMAGE = "use an image with these versions: docs/slurm.md, The container"


def refusal(
    version: Mapping[str, str], facts: Mapping[str, object], environ: Mapping[str, str], move: str = IMAGE
) -> str:
    """Return the reason why a run must not start with the installed versions, and the hint `move`; '' if it may.

    Args:
        version: package -> installed version (`installed_versions`).
        facts: the content of run.json.
        environ: environment variables; IGNORE permits versions that are not verified.
        move: the hint.
    """
    conflict = bad_pair(version)
    if conflict:
        return conflict

    on_gpu = "cuda" in version  # a rehearsal uses torch without CUDA and does not need Transformer Engine
    needs = requirements_of(facts) if on_gpu else []
    visible_needs = [need for need in needs if need.package in version or need.package not in UNSEEN_AT_TIMES]
    own_violations = find_violations(version, visible_needs)
    known_violations = find_violations(version, on_gpu=on_gpu)
    if known_violations and environ.get(IGNORE) == "1":
        print(f"{IGNORE}=1: " + "; ".join(known_violations), flush=True)
        known_violations = []

    problems = known_violations + own_violations
    if not problems:
        return ""
    hint = f"; {IGNORE}=1 allows versions that are not verified" if known_violations else ""
    return f"{'; '.join(problems)}\nnext: {move}{hint}"


def cuda_of_torch() -> str:
    """Return the CUDA version of the installed torch, such as 13.0, without importing torch; "" if there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return ""
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return ""
    match = re.search(r"^cuda\b[^=\n]*= *['\"](.*)['\"]", text, re.MULTILINE)
    return match[1] if match else ""


def installed_versions(more: Iterable[str] = ()) -> dict[str, str]:
    """Return the installed versions of SHOWN_PACKAGES, `more` and those in KNOWN_BAD, and the CUDA of torch as `cuda`.

    cuDNN is included only if `more` contains it and torch supports CUDA.
    """
    more, versions = set(more), {}
    cuda = cuda_of_torch()
    if cuda:
        versions["cuda"] = cuda
    library = cudnn.version() if cuda and cudnn.NAME in more else None
    if library:
        versions[cudnn.NAME] = library
    for name in {*SHOWN_PACKAGES, *more, *(pair[2] for pair in KNOWN_BAD)} - {"cuda", cudnn.NAME}:
        version = version_of(name)
        if version:
            versions[name] = version
    return versions


@cache
def version_of(name: str) -> str | None:
    """Return the version of the distribution `name`; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """Return the name of the processor from /proc/cpuinfo, or else the machine type."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.machine()


def usable_cores() -> int:
    """Return the number of cores on which this process may run, according to its CPU affinity."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def ram_bytes() -> int:
    """Return the physical memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
