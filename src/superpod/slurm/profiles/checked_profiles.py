"""Record which profiles `recipes cluster check` has compared with a node; `recipes submit` warns about the others."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.requests.resolve import cache_folder
from superpod.slurm.profiles.profile_checks import Finding

if TYPE_CHECKING:
    from superpod.slurm.profiles.profiles import Cluster


def _mark(cluster: Cluster) -> Path:
    """Return the path of an empty marker file named after a hash of the profile, so that a changed profile is
    unchecked.
    """
    return cache_folder().parent / "checked" / hashlib.sha256(cluster.model_dump_json().encode()).hexdigest()[:32]


def mark_checked(cluster: Cluster) -> None:
    """Record that the profile matches a node."""
    try:
        _mark(cluster).parent.mkdir(parents=True, exist_ok=True)
        _mark(cluster).touch()
    except OSError:
        pass  # with a read-only home folder, submit keeps warning


def unchecked_findings(cluster: Cluster) -> list[Finding]:
    """Return a note for a profile that has not been compared with a node; not a reason to refuse a submission."""
    if _mark(cluster).is_file():
        return []
    keys = "network interface, modules, Pythons, shared folders"
    return [
        Finding(
            f"this profile has not been compared with a node ({keys})",
            "run `recipes cluster check`, which takes seconds",
        )
    ]
