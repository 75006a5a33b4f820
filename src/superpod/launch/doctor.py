"""Check this machine for `recipes doctor`: Python, packages, GPU, CPU, disk, Slurm. Imports neither torch nor NeMo."""

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

# The only set of versions known to resolve, import and train together: constraints.txt, docs/LOG.md.
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
        "rehearse, train, export a recipe, plot loss curves",
    ),
    "gpu": (("transformer-engine",), "Transformer Engine's kernels and FP8"),
    "dev": (
        ("pytest", "pytest-timeout", "hypothesis", "ruff", "pyright", "pre-commit", "build"),
        "tests and static checks",
    ),
}


@dataclass(frozen=True)
class Check:
    """The result of a check."""

    name: str
    ok: bool
    detail: str
    """the installed versions, or the problem"""
    enables: str = ""
    """the features that need it"""
    next: str = ""
    """the fix of a problem"""


def run_checks() -> list[Check]:
    """Run all checks, in the order of the report. Takes 0.1 s, or as long as nvidia-smi."""
    return [
        _check_python(),
        *(_check_extra(name) for name in _EXTRAS),
        *_check_pins(),
        _check_gpu(),
        _check_cpu(),
        _check_disk(),
        _check_slurm(),
        _check_torchrun(),
        *_check_package_names(),
    ]


def satisfies(version: str, rule: str) -> bool:
    """Return whether `version` satisfies a rule such as `==2.7.*` or `<22`, ignoring a local version such as `+cpu`."""
    numbers = [int(n) for n in re.findall(r"\d+", re.split(r"[+a-z]", version)[0])]
    required = [int(n) for n in re.findall(r"\d+", rule)]
    if rule.startswith("=="):
        return numbers[: len(required)] == required
    return numbers < required


def _check_python() -> Check:
    ok = sys.version_info >= (3, 11)
    return Check("python", ok, f"{platform.python_version()} at {sys.executable}", next="" if ok else "use 3.11+")


def _check_extra(name: str) -> Check:
    packages, enables = _EXTRAS[name]
    title, target = (name, ".") if name == "base" else (f"extra {name}", f"'.[{name}]'")
    missing_packages = [package for package in packages if not version_of(package)]
    if missing_packages:
        fix = f"pip install -c constraints.txt -e {target}"
        return Check(title, False, f"missing: {', '.join(missing_packages)}", enables, fix)
    return Check(title, True, ", ".join(f"{package} {version_of(package)}" for package in packages[:4]), enables)


def _check_pins() -> list[Check]:
    """Return a check per package whose version is not known to work, or a single successful check."""
    problems = []
    for name, rule in KNOWN_GOOD.items():
        version = version_of(name)
        if version and not satisfies(version, rule):
            fix = f"pip install '{name}{rule}'"
            problems.append(Check(f"version of {name}", False, f"{version}, known to work: {rule}", "NeMo 2.7.3", fix))
    if problems:
        return problems
    count = sum(bool(version_of(name)) for name in KNOWN_GOOD)
    return [
        Check("versions", True, f"{count} of {len(KNOWN_GOOD)} pinned packages installed, all versions known to work")
    ]


class Gpu(NamedTuple):
    """A GPU of this machine, as listed by nvidia-smi."""

    name: str
    memory_mib: int
    driver: str


def list_gpus() -> list[Gpu]:
    """Return the GPUs of this machine; [] if there is no nvidia-smi, or it lists none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    output = output_of([tool, *query], timeout_s=10) or ""
    rows = [[part.strip() for part in line.split(",")] for line in output.splitlines()]
    return [Gpu(row[0], int(row[1]), row[2]) for row in rows if len(row) == 3 and row[1].isdigit()]


def _check_gpu() -> Check:
    enables = "training at full size; without a GPU, recipes are rehearsed on CPUs"
    if shutil.which("nvidia-smi") is None:
        return Check("GPU", False, "none (no nvidia-smi on PATH)", enables)
    gpus = list_gpus()
    if not gpus:
        return Check("GPU", False, "nvidia-smi lists none", enables, "run nvidia-smi to see its error")
    name, mib, driver = gpus[0]
    detail = f"{len(gpus)} x {name}, {mib / 1024:.0f} GiB, driver {driver}"
    return Check("GPU", True, detail, f"{enables}; `recipes fit` shows what they can train")


def _check_cpu() -> Check:
    cores, ram = usable_cores(), ram_bytes() / GIB
    detail = f"{cpu_model()}, {cores} cores, {ram:.0f} GiB RAM"
    return Check("CPU", cores >= 2 and ram >= 4, detail, "a rehearsal takes a core and about 1 GiB per rank")


def _check_disk() -> Check:
    free_gib = shutil.disk_usage(Path.cwd()).free / GIB
    return Check(
        "disk", free_gib >= 5, f"{free_gib:.0f} GiB free in {Path.cwd()}", "checkpoints of a rehearsal: under 1 GiB"
    )


def _check_slurm() -> Check:
    commands = ("sbatch", "squeue", "sacct", "scancel", "scontrol", "sinfo")
    missing_commands = [name for name in commands if shutil.which(name) is None]
    enables = "submitting jobs from this machine"
    if missing_commands:
        return Check(
            "Slurm", False, f"missing: {', '.join(missing_commands)}", enables, "use a login node of the cluster"
        )
    return Check("Slurm", True, "all commands on PATH", enables)


def _check_torchrun() -> Check:
    enables = "runs on this machine"
    path = shutil.which("torchrun")
    if path:
        return Check("torchrun", True, path, enables)
    installed = Path(sys.executable).with_name("torchrun")
    fix = f"export PATH={installed.parent}:$PATH" if installed.exists() else "install the extra nemo"
    return Check("torchrun", False, "not on PATH", enables, fix)


def _check_package_names() -> list[Check]:
    """Return a check per folder on sys.path that contains another package with the name of one of our subpackages."""
    findings = []
    for name in ("recipes", "planner", "launch"):
        for folder in dict.fromkeys(sys.path):
            if folder and Path(folder).resolve() != PROJECT and (Path(folder) / name / "__init__.py").is_file():
                detail = f"{folder} contains a package of this name; harmless, since ours is superpod.{name}"
                findings.append(Check(f"package {name}", True, detail))
    return findings
