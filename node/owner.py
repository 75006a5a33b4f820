"""Who owns a run: the user who owns its folder. Several users may share a folder of runs; all change only their own."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from superpod.errors import UserError

_OVERFLOW = Path("/proc/sys/kernel/overflowuid")


def uid_of(run: Path) -> int | None:
    """The user id that owns a run folder; None where it cannot be read, or stands for nobody in particular.

    A file system that cannot map an owner (NFS with root squash or without id mapping, a user namespace) shows the
    kernel's overflow id, mostly 65534, for all of them (proc_sys_kernel(5)).
    """
    try:
        uid = run.stat().st_uid
    except OSError:
        return None
    return None if uid == _unmapped() else uid


def is_mine(run: Path) -> bool:
    """Whether this user owns a run folder; an owner that cannot be told counts as this user."""
    return uid_of(run) in (None, os.geteuid())


def name_of(uid: int | None) -> str:
    """The user's name; the number where it has none, '?' for an unknown owner."""
    if uid is None:
        return "?"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def refuse_others(run: Path, doing: str, *, root_may: bool = True) -> None:
    """Refuse to go on as another user than the run's owner; `doing` is what only the owner may do, in words.

    `root_may`: an administrator may stop a run and free its disk, but jobs queued as root would run as root.

    Raises:
        UserError: with both names.
    """
    owner, me = uid_of(run), os.geteuid()
    if owner in (None, me) or (root_may and me == 0):
        return
    name = name_of(owner)
    raise UserError(
        f"{run} belongs to {name}, and you are {name_of(me)}: only {name} may {doing}",
        f"ask {name}, or start a run of your own",
    )


def _unmapped() -> int:
    try:
        return int(_OVERFLOW.read_text())
    except (OSError, ValueError):
        return 65534
