"""Find the profile of a run in RUN/profile, and read a profile in any supported format."""

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
"""Files written by NeMo's PytorchProfilerCallback (2.7.3) and `nsys profile --export=sqlite`."""


def find_profile(run: RunFolder, rank: int | None = None) -> Path:
    """Return the path of a rank's profile in a run, by default of the lowest rank that has one.

    Raises:
        UserError: there is no such profile.
    """
    folder = run.path / FOLDER
    profiles = _list_profiles(run)
    matching_paths = [path for number, path in profiles if rank in (None, number)]
    if matching_paths:
        return matching_paths[0]
    if profiles:
        recorded_ranks = ", ".join(str(number) for number, _ in profiles)
        raise UserError(f"{folder} has no profile of rank {rank}", f"use --rank with a recorded rank: {recorded_ranks}")
    reports = sorted(folder.glob(f"*{REPORT}"))
    if reports:
        raise _not_exported_error(reports[0])
    profile_text = str(run.facts.get("profile", ""))
    if profile_text:
        raise UserError(
            f"{run.path} has no profile yet: {profile_text} was requested (tool:steps:ranks)",
            "the profile is written after the last of these steps; if it is missing then, read the log of the rank",
        )
    raise UserError(f"{run.path} was not profiled", "start a run with `recipes run|submit NAME --profile torch`")


def _list_profiles(run: RunFolder) -> list[tuple[int, Path]]:
    """Return (rank, file) for each readable profile, sorted by rank."""
    files = [path for pattern in PATTERNS for path in (run.path / FOLDER).glob(pattern)]
    return sorted(((_rank(path), path) for path in files), key=lambda found: (found[0], str(found[1])))


def _rank(path: Path) -> int:
    """Return the rank in a file name such as `rank-3.json`; 0 if there is none."""
    number = path.name.partition(".")[0].rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def profiled_ranks(run: RunFolder) -> list[int]:
    """Return the sorted ranks of a run that have a readable profile."""
    return sorted({rank for rank, _ in _list_profiles(run)})


def read(path: Path, *, gpu: int | None = None, steps: int = 0) -> Recording:
    """Read a profile in any supported format, which is detected from the file's content.

    Args:
        path: a torch.profiler trace or an SQLite export of Nsight Systems.
        gpu: number of the GPU to read; None = the first one in the file.
        steps: number of steps in the file, for files without step markers.

    Raises:
        UserError: the file cannot be read or has a different format.
    """
    try:
        with path.open("rb") as file:
            start = file.read(16)
    except OSError as error:
        hint = "specify a trace, an export or a run folder"
        raise UserError(f"{path} cannot be read: {error.strerror}", hint) from error
    if path.suffix in (REPORT, ".qdrep", ".qdstrm"):
        raise _not_exported_error(path)
    is_export = start == profile_nsys.MAGIC
    recording = profile_nsys.read(path, gpu) if is_export else profile_torch.read(path, gpu)
    if recording.steps or not steps:
        return recording
    items = len(recording.work)
    if steps > items:
        raise UserError(
            f"--steps {steps:,}: {path} has only {items:,} kernels or operations, but a step has many", "use --steps 1"
        )
    return replace(recording, steps=steps, marks="--steps")


def _not_exported_error(path: Path) -> UserError:
    target = shlex.quote(str(path.with_suffix(".sqlite")))
    return UserError(
        f"{path} is a Nsight Systems report, which only nsys can read",
        f"export it first: `nsys export --type sqlite --output {target} {shlex.quote(str(path))}`; "
        f"then run `recipes profile show {target}`",
    )
