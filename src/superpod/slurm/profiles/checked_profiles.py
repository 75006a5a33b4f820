"""Which profiles `recipes cluster check` has compared with a node: `recipes submit` says when one has not been."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.requests.resolve import cache_folder
from superpod.slurm.profiles.profile_checks import Finding

if TYPE_CHECKING:
    from superpod.slurm.profiles.profiles import Cluster


def _mark(cluster: Cluster) -> Path:
    """One empty file for all that a profile says: a changed profile has not been compared."""
    return cache_folder().parent / "checked" / hashlib.sha256(cluster.model_dump_json().encode()).hexdigest()[:32]


def mark_checked(cluster: Cluster) -> None:
    """Keep that a node agrees with this profile."""
    try:
        _mark(cluster).parent.mkdir(parents=True, exist_ok=True)
        _mark(cluster).touch()
    except OSError:
        pass  # a home that cannot be written: submit goes on saying so


def unchecked_findings(cluster: Cluster) -> list[Finding]:
    """What `submit` says of a profile that no node has been compared with; it is no reason to refuse."""
    if _mark(cluster).is_file():
        return []
    keys = "its interface, modules and Pythons, and whether its folders are shared"
    return [Finding(f"no node has been asked about this profile: {keys}", "recipes cluster check says, in seconds")]
