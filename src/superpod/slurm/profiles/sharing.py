"""Sets the permissions of run folders, by the umask and group of a profile, for users who share a folder for runs."""

from __future__ import annotations

import grp
import os
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from superpod.errors import UserError

UNPACK_RUN = r"""
set -e
umask "${2:-$(printf %04o $((0$(umask) | 022)))}"
mkdir -p "$1"
unsafe() { [ -z "$(find "$1/." -maxdepth 0 \( -perm -1000 -o ! -perm /022 \))" ]; }
fail() { echo "$1" >&2; exit 1; }
! unsafe "$1" || fail "other users can write to $1 and could replace your runs: chmod +t, or specify another folder"
me=$(id -u) trusted=$(stat -Lc %u "$1") run=
for folder in "$1/$4" "$1/$4.$(id -un)"; do
    mkdir "$folder" 2>/dev/null || :
    owners=$(stat -c %u "$folder"):$(stat -Lc %u "$folder" || :)
    case $owners in "$me:$me" | 0:0 | "$trusted:$trusted") ;; *) continue ;; esac
    if [ -d "$folder" ] && [ -w "$folder" ] && ! unsafe "$folder"; then run=$folder/$5 && break; fi
done
[ -n "$run" ] || fail "$1/$4 and $1/$4.$(id -un) belong to other users: specify a folder of your own"
mkdir "$run"
tar -xz --no-same-permissions --no-same-owner -C "$run"
[ -z "$3" ] || { chgrp -R -- "$3" "$run" && find "$run" -type d -exec chmod g+s {} +; }
printf %s "$run"
"""
"""Unpack a run folder on a remote machine and print its path. Arguments: folder for runs, umask, group, recipe, run
name.

Ensures, as runtime/runs/owner.py does on this machine, that no other user can write into the run or replace it.
"""

WRITE_SWEEP = r"""
set -e
[ -z "$2" ] || umask "$2"
mkdir -p "$1"
[ -O "$1/.." ] && chmod --reference="$1/../.." "$1/.." || :
[ -z "$3" ] || { chgrp -- "$3" "$1" && chmod g+s "$1"; }
cat >"$1/$4"
"""
"""Write a sweep's file on this machine or over SSH. Arguments: folder of the sweep, umask, group, file name.

The parent folder is shared by all users, so it gets the permissions of the folder for runs.
"""


@contextmanager
def umask(mask: str) -> Iterator[None]:
    """Set the umask of this process within the block; `mask` is an octal number such as "0027", "" changes nothing."""
    if not mask:
        yield
        return
    old_umask = os.umask(int(mask, 8))
    try:
        yield
    finally:
        os.umask(old_umask)


def with_full_permissions(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Set full permissions on an archive member and return it; the umask of the unpacking process restricts them."""
    member.mode = 0o777 if member.isdir() else 0o666
    return member


@contextmanager
def inherit_permissions(run: Path) -> Iterator[None]:
    """Within the block, create files with the permissions of a run folder; no effect if the folder does not exist."""
    try:
        mode = stat.S_IMODE(run.stat().st_mode)
    except OSError:
        mode = None
    with umask("" if mode is None else f"{0o777 & ~mode:o}"):
        yield


def set_group(run: Path, group: str) -> None:
    """Set the group of a run folder and its files, and the setgid bit for files created later; "" changes nothing.

    Raises:
        UserError: there is no such group, or this user is not a member.
    """
    if not group:
        return
    try:
        number = grp.getgrnam(group).gr_gid
    except KeyError:
        raise UserError(f"folders.group: this machine has no group {group!r}", "`id -Gn` lists your groups") from None
    try:
        for path in (run, *run.rglob("*")):
            os.chown(path, -1, number)
            if path.is_dir():
                path.chmod(stat.S_IMODE(path.stat().st_mode) | stat.S_ISGID)
    except PermissionError:
        raise UserError(f"folders.group: you are not in the group {group!r}", "`id -Gn` lists your groups") from None
