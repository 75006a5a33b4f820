"""Records the profiles that `recipes cluster check` has compared with a node; `recipes submit` warns about others."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.requests.resolve import cache_folder
from superpod.slurm.profiles.profile_checks import Finding

if TYPE_CHECKING:
    from superpod.slurm.profiles.profiles import Cluster


def _marker(cluster: Cluster) -> Path:
    """Return the path of the marker file of a checked profile; its name is a hash of all values of the profile."""
    return cache_folder().parent / "checked" / hashlib.sha256(cluster.model_dump_json().encode()).hexdigest()[:32]


def mark_checked(cluster: Cluster) -> None:
    """Record that a profile matches a node of its cluster."""
    try:
        _marker(cluster).parent.mkdir(parents=True, exist_ok=True)
        _marker(cluster).touch()
    except OSError:
        pass  # with a read-only home folder, submit keeps warning


def unchecked_findings(cluster: Cluster) -> list[Finding]:
    """Return a note if a profile has not been compared with a node of its cluster; otherwise []."""
    if _marker(cluster).is_file():
        return []
    message = "this profile has not been compared with a node (network, modules, Python versions, shared folders)"
    return [Finding(message, "run `recipes cluster check`, which takes seconds")]
