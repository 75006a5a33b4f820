"""Which file a word means: a trace, an export, or what a run left in RUN/profile; and the recording in it."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from superpod.errors import UserError
from superpod.profiles import profile_nsys, profile_torch
from superpod.profiles.profile_recording import Recording
from superpod.runtime.rank.nsys import FOLDER
from superpod.runtime.runs.run_folder import RunFolder

REPORT = ".nsys-rep"
PATTERNS = ("rank-*/device/rank-*.json*", "*.sqlite", "*/*.sqlite")
"""Where NeMo's PytorchProfilerCallback (2.7.3) and `nsys profile --export=sqlite` write."""


def find_profile(run: RunFolder, rank: int | None = None) -> Path:
    """The profile of a run: of a rank, or of the lowest that has one.

    Raises:
        UserError: it has none, and what to do.
    """
    folder = run.path / FOLDER
    files = sorted((path for pattern in PATTERNS for path in folder.glob(pattern)), key=_rank_of)
    wanted = [path for path in files if rank is None or _rank_of(path)[0] == rank]
    if wanted:
        return wanted[0]
    if files:
        have = ", ".join(str(_rank_of(path)[0]) for path in files)
        raise UserError(f"{folder} has no profile of rank {rank}: it has that of rank {have}", "--rank N, one of these")
    if reports := sorted(folder.glob(f"*{REPORT}")):
        raise _not_exported(reports[0])
    wanted_profile = str(run.facts.get("profile", ""))
    if wanted_profile:
        raise UserError(
            f"{run.path} has no profile yet: {wanted_profile} was to be recorded (tool:steps:ranks)",
            "it is written after the last of these steps; else the log of that rank says why it is not",
        )
    raise UserError(f"{run.path} was not profiled", "recipes run|submit NAME --profile torch")


def _rank_of(path: Path) -> tuple[int, str]:
    number = path.name.partition(".")[0].rpartition("-")[2]
    return (int(number) if number.isdecimal() else 0, str(path))


def profiled_ranks(run: RunFolder) -> list[int]:
    """Those that left a profile that can be read."""
    return sorted({_rank_of(path)[0] for pattern in PATTERNS for path in (run.path / FOLDER).glob(pattern)})


def read(path: Path, *, gpu: int | None = None, steps: int = 0) -> Recording:
    """The recording in a file, whatever its name; `steps` is how many it holds, where it does not say so.

    Raises:
        UserError: it cannot be read, or is something else, and what to give in its place.
    """
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}", "give a trace, an export or a run folder"
        ) from error
    if path.suffix in (REPORT, ".qdrep", ".qdstrm"):
        raise _not_exported(path)
    recording = profile_nsys.read(path, gpu) if start == profile_nsys.MAGIC else profile_torch.read(path, gpu)
    if recording.steps or not steps:
        return recording
    if steps > (most := len(recording.work)):
        raise UserError(
            f"--steps {steps:,}: {path} holds {most:,} kernels or operations, and a step has many", "--steps 1"
        )
    return replace(recording, steps=steps, marks="--steps")


def _not_exported(path: Path) -> UserError:
    target = shlex.quote(str(path.with_suffix(".sqlite")))
    return UserError(
        f"{path} is a report of Nsight Systems, which only nsys reads",
        f"nsys export --type sqlite --output {target} {shlex.quote(str(path))}, then recipes profile show {target}",
    )
