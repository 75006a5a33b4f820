"""Versions, commit and machine of a run: what env.json keeps, and which versions are known not to work together."""

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

from superpod.common.files import JsonObject
from superpod.runtime.processes.command import output_of
from superpod.runtime.rank import cudnn

GIB = 2**30
PROJECT = Path(__file__).resolve().parents[4]

REPORTED = ("torch", "nemo_toolkit", "megatron-core", "nemo_run", "transformer-engine", "lightning", "numpy")

KNOWN_BAD = (
    ("nemo_toolkit", "2.7.", "megatron-core", "0.16", "NeMo 2.7 passes arguments that Megatron-Core 0.16 has dropped"),
    ("nemo_run", "0.11.", "leptonai", "0.4", "NeMo-Run 0.11 does not import with leptonai 0.47; 0.27.3 does"),
)
"""Pairs that are known not to work: package, version, package, version, why."""


class Range(NamedTuple):
    """Versions of a package that a run may have, and why no others."""

    package: str
    least: str
    below: str
    """"" = any newer one"""
    why: str


PROVEN = (
    Range("nemo_toolkit", "2.7", "2.8", "recipes are written for NeMo 2.7.3, the last line with nemo.collections.llm"),
    Range("megatron-core", "0.15", "0.16", "NeMo 2.7 passes arguments that 0.16 dropped; proofs are 0.15.3's"),
    Range("transformer-engine", "2.9", "2.10", "what megatron-core 0.15.3 asks for, and what recipes are proven with"),
)
"""What recipes are proven with. On a GPU each must be there."""

IGNORE = "SUPERPOD_UNPROVEN_VERSIONS"
"""Set to 1 in a profile's [env], versions outside `PROVEN` are printed and not refused."""

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
    """Why these installed versions cannot work together; '' when nothing is known against them."""
    for one, this, other, that, why in KNOWN_BAD:
        if version.get(one, "").startswith(this) and version.get(other, "").startswith(that):
            return f"{one} {version[one]} with {other} {version[other]}: {why}"
    return ""


def outside(version: Mapping[str, str], ranges: Iterable[Range] = PROVEN, *, on_gpu: bool = True) -> list[str]:
    """The packages outside their ranges, each with its numbers and the reason; on a GPU also those that are missing."""
    problems = []
    for package, least, below, why in ranges:
        limits = f"{least} or later" + (f", below {below}" if below else "")
        own = version.get(package)
        if own is None:
            problems += [f"{package} is missing, and must be {limits}: {why}"] if on_gpu else []
        elif numbers(own) < numbers(least) or (below and numbers(own) >= numbers(below)):
            problems.append(f"{package} is {own}, and must be {limits}: {why}")
    return problems


def numbers(version: str) -> tuple[int, ...]:
    """A version's numbers, without what follows them and trailing zeros: 2.9.0+70f5366 is (2, 9), 0.16.0rc0 (0, 16)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    parts = [int(part) for part in match[0].split(".")] if match else []
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def needed(facts: Mapping[str, object]) -> list[Range]:
    """What a run needs beyond `PROVEN`, as the `needs` of its run.json say; [] where they say nothing."""
    rows = facts.get("needs")
    return [Range(*map(str, row)) for row in rows if len(row) == len(Range._fields)] if isinstance(rows, list) else []


IMAGE = "name an image that has them: docs/slurm.md, The container"


def refusal(
    version: Mapping[str, str], facts: Mapping[str, object], environ: Mapping[str, str], move: str = IMAGE
) -> str:
    """Why a run with these facts must not start with these versions, and the next `move`; '' when it may."""
    if conflict := bad_pair(version):
        return conflict
    on_gpu = "cuda" in version  # a rehearsal's torch has none, and needs no Transformer Engine
    needs = needed(facts) if on_gpu else []
    # A cuDNN that is not found here may still be the right one, in a place that only torch knows.
    own = outside(version, [need for need in needs if need.package != cudnn.NAME or cudnn.NAME in version])
    proven = outside(version, on_gpu=on_gpu)
    if proven and environ.get(IGNORE) == "1":
        print(f"{IGNORE}=1: " + "; ".join(proven), flush=True)
        proven = []
    if not (problems := proven + own):
        return ""
    return "; ".join(problems) + f"\nnext: {move}" + (f"; {IGNORE}=1 goes on without a proof" if proven else "")


def cuda_of_torch() -> str:
    """The CUDA that the installed torch is built for, such as 13.0, without importing it; "" for none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return ""
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return ""
    match = re.search(r"^cuda\b[^=\n]*= *['\"](.*)['\"]", text, re.MULTILINE)
    return match[1] if match else ""


def installed(more: Iterable[str] = ()) -> dict[str, str]:
    """Versions of what SHOWN, KNOWN_BAD and `more` name, as far as installed, and torch's CUDA as `cuda`.

    cuDNN is looked for only where `more` names it, and torch is one for GPUs.
    """
    more = set(more)
    versions = {"cuda": cuda} if (cuda := cuda_of_torch()) else {}
    if cuda and cudnn.NAME in more and (library := cudnn.version()):
        versions[cudnn.NAME] = library
    for name in {*SHOWN, *more, *(pair[2] for pair in KNOWN_BAD)} - {"cuda", cudnn.NAME}:
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
