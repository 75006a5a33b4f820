"""What this machine has, what it lacks, and what each missing part would enable. Imports neither torch nor NeMo."""

from __future__ import annotations

import platform
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from superpod.runtime.processes.command import output_of
from superpod.runtime.runs.versions import GIB, PROJECT, cpu_model, ram_bytes, usable_cores, version_of

# The one set of versions that resolves, imports and trains together: constraints.txt, docs/LOG.md.
KNOWN_GOOD = {
    "torch": "==2.13.*",
    "nemo_toolkit": "==2.7.*",
    "megatron-core": "==0.15.*",
    "nemo_run": "==0.11.*",
    "leptonai": "<0.30",
    "pyarrow": "<22",
    "numpy": "<2",
    "protobuf": "==5.29.*",
}

_EXTRAS = {
    "base": (("typer", "rich", "pydantic"), "list, report, data add"),
    "nemo": (
        ("torch", "nemo_toolkit", "megatron-core", "nemo_run", "lightning", "matplotlib"),
        "rehearse and train, export a recipe, draw loss curves",
    ),
    "gpu": (("transformer-engine",), "the real kernels, FP8, and training at speed"),
    "dev": (
        ("pytest", "pytest-timeout", "hypothesis", "ruff", "pyright", "pre-commit", "build"),
        "the tests and checks",
    ),
}


@dataclass(frozen=True)
class Check:
    """One finding: `detail` is what is installed, `enables` what it is good for, `next` the command that mends it."""

    name: str
    ok: bool
    detail: str
    enables: str = ""
    next: str = ""


def run_checks() -> list[Check]:
    """Every finding about this machine, in the order to read them; 0.1 s, or as long as nvidia-smi takes."""
    return [
        _python(),
        *(_extra(name) for name in _EXTRAS),
        *_pins(),
        _gpu(),
        _cores(),
        _disk(),
        _slurm(),
        _torchrun(),
        *_decoys(),
    ]


def satisfies(version: str, rule: str) -> bool:
    """Whether `version` keeps a rule of the forms `==2.7.*` and `<22`; a local part such as `+cpu` does not count."""
    numbers = [int(n) for n in re.findall(r"\d+", re.split(r"[+a-z]", version)[0])]
    wanted = [int(n) for n in re.findall(r"\d+", rule)]
    return numbers[: len(wanted)] == wanted if rule.startswith("==") else numbers < wanted


def _python() -> Check:
    detail = f"{platform.python_version()} at {sys.executable}"
    return Check("python", sys.version_info >= (3, 11), detail, next="" if sys.version_info >= (3, 11) else "use 3.11+")


def _extra(name: str) -> Check:
    packages, enables = _EXTRAS[name]
    have = [f"{package} {version_of(package)}" for package in packages if version_of(package)]
    missing = [package for package in packages if not version_of(package)]
    where = "." if name == "base" else f"'.[{name}]'"
    detail = ", ".join(have[:4]) if not missing else f"missing: {', '.join(missing)}"
    fix = f"pip install -c constraints.txt -e {where}" if missing else ""
    return Check(name if name == "base" else f"extra {name}", not missing, detail, enables, fix)


def _pins() -> list[Check]:
    """A finding for each installed package outside the known-good versions, or one that all is well."""
    wrong = []
    for name, rule in KNOWN_GOOD.items():
        version = version_of(name)
        if version and not satisfies(version, rule):
            fix = f"pip install '{name}{rule}'"
            wrong.append(Check(f"version of {name}", False, f"{version}, known to work: {rule}", "NeMo 2.7.3", fix))
    checked = [name for name in KNOWN_GOOD if version_of(name)]
    return wrong or [
        Check("versions", True, f"{len(checked)} of {len(KNOWN_GOOD)} pinned packages here, all as known to work")
    ]


class Gpu(NamedTuple):
    """A GPU of this machine, as nvidia-smi lists it."""

    name: str
    memory_mib: int
    driver: str


def list_gpus() -> list[Gpu]:
    """This machine's GPUs; [] without nvidia-smi, or when it lists none."""
    tool = shutil.which("nvidia-smi")
    query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    out = output_of([tool, *query], timeout_s=10) if tool else None
    rows = [[part.strip() for part in line.split(",")] for line in (out or "").splitlines()]
    return [Gpu(row[0], int(row[1]), row[2]) for row in rows if len(row) == 3 and row[1].isdigit()]


def _gpu() -> Check:
    enables = "training at full size; without one, a recipe is rehearsed on CPUs"
    if shutil.which("nvidia-smi") is None:
        return Check("GPU", False, "none (no nvidia-smi on PATH)", enables)
    listed = list_gpus()
    if not listed:
        return Check("GPU", False, "nvidia-smi lists none", enables, "run nvidia-smi and read what it says")
    name, mib, driver = listed[0]
    detail = f"{len(listed)} x {name}, {mib / 1024:.0f} GiB, driver {driver}"
    return Check("GPU", True, detail, f"{enables}; `recipes fit` shows what they can train")


def _cores() -> Check:
    cores, ram = usable_cores(), ram_bytes() / GIB
    detail = f"{cpu_model()}, {cores} cores, {ram:.0f} GiB RAM"
    return Check("CPU", cores >= 2 and ram >= 4, detail, "a rehearsal takes a core and about 1 GiB per rank")


def _disk() -> Check:
    free = shutil.disk_usage(Path.cwd()).free / GIB
    return Check("disk", free >= 5, f"{free:.0f} GiB free in {Path.cwd()}", "checkpoints of a rehearsal: under 1 GiB")


def _slurm() -> Check:
    commands = ("sbatch", "squeue", "sacct", "scancel", "scontrol", "sinfo")
    have = [name for name in commands if shutil.which(name)]
    missing = [name for name in commands if name not in have]
    detail = "all commands on PATH" if not missing else f"missing: {', '.join(missing)}"
    fix = "" if not missing else "only a cluster's login node has them"
    return Check("Slurm", not missing, detail, "jobs on a cluster, from here", fix)


def _torchrun() -> Check:
    path = shutil.which("torchrun")
    beside = Path(sys.executable).with_name("torchrun")
    fix = "" if path else f"export PATH={beside.parent}:$PATH" if beside.exists() else "install the extra nemo"
    return Check("torchrun", path is not None, path or "not on PATH", "runs on this machine", fix)


def _decoys() -> list[Check]:
    """Other packages with the names of our folders; ours are imported as superpod.*, so they do no harm."""
    findings = []
    for name in ("recipes", "planner", "launch"):
        for folder in dict.fromkeys(sys.path):
            if folder and Path(folder).resolve() != PROJECT and (Path(folder) / name / "__init__.py").is_file():
                findings.append(
                    Check(f"package {name}", True, f"another one in {folder}: harmless, ours is superpod.{name}")
                )
    return findings
