"""Who may read what runs leave: a profile's umask and group, for a folder of runs that several users share."""

from __future__ import annotations

import grp
import os
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from superpod.errors import UserError

REMOTE = r"""
set -e
umask "${2:-$(printf %04o $((0$(umask) | 022)))}"
mkdir -p "$1"
unsafe() { [ -z "$(find "$1/." -maxdepth 0 \( -perm -1000 -o ! -perm /022 \))" ]; }
fail() { echo "$1" >&2; exit 1; }
! unsafe "$1" || fail "others can write to $1, and could replace runs there: chmod +t, or name another folder"
me=$(id -u) trusted=$(stat -Lc %u "$1") run=
for folder in "$1/$4" "$1/$4.$(id -un)"; do
    mkdir "$folder" 2>/dev/null || :
    owners=$(stat -c %u "$folder"):$(stat -Lc %u "$folder" || :)
    case $owners in "$me:$me" | 0:0 | "$trusted:$trusted") ;; *) continue ;; esac
    if [ -d "$folder" ] && [ -w "$folder" ] && ! unsafe "$folder"; then run=$folder/$5 && break; fi
done
[ -n "$run" ] || fail "others have made $1/$4 and $1/$4.$(id -un): name a folder of your own"
mkdir "$run"
tar -xz --no-same-permissions --no-same-owner -C "$run"
[ -z "$3" ] || { chgrp -R -- "$3" "$run" && find "$run" -type d -exec chmod g+s {} +; }
printf %s "$run"
"""
"""Unpack a run folder behind SSH with these rights: folder for runs, umask, group, recipe, and the run's name.

As runtime/runs/owner.py does it here: nobody else can write into the run or replace it. Prints the path.
"""

SWEEP = r"""
set -e
[ -z "$2" ] || umask "$2"
mkdir -p "$1"
[ -O "$1/.." ] && chmod --reference="$1/../.." "$1/.." || :
[ -z "$3" ] || { chgrp -- "$3" "$1" && chmod g+s "$1"; }
cat >"$1/$4"
"""
"""Write a sweep's file, here or behind SSH: folder of the sweep, umask, group, and the file's name in it.

The folder above it is every user's, as a recipe's folder is, so it gets the rights of the folder for runs.
"""


@contextmanager
def umask(mask: str) -> Iterator[None]:
    """Make files with a profile's umask, such as "0027"; with this process's own where it is ''."""
    if not mask:
        yield
        return
    before = os.umask(int(mask, 8))
    try:
        yield
    finally:
        os.umask(before)


def with_full_permissions(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """For an archive: the umask where it is unpacked takes rights away, and not the one of this machine as well."""
    member.mode = 0o777 if member.isdir() else 0o666
    return member


@contextmanager
def inherit_permissions(run: Path) -> Iterator[None]:
    """Make files with the rights of a run folder: also where no profile is at hand. No effect where it is gone."""
    try:
        mode = stat.S_IMODE(run.stat().st_mode)
    except OSError:
        mode = None
    with umask("" if mode is None else f"{0o777 & ~mode:o}"):
        yield


def set_group(run: Path, group: str) -> None:
    """Give a new run folder to a group; what is made in it later belongs to that group too (the setgid bit).

    Raises:
        UserError: there is no such group, or this user is not in it.
    """
    if not group:
        return
    try:
        number = grp.getgrnam(group).gr_gid
    except KeyError:
        raise UserError(f"folders.group: this machine has no group {group!r}", "`id -Gn` lists yours") from None
    try:
        for path in (run, *run.rglob("*")):
            os.chown(path, -1, number)
            if path.is_dir():
                path.chmod(stat.S_IMODE(path.stat().st_mode) | stat.S_ISGID)
    except PermissionError:
        raise UserError(f"folders.group: you are not in the group {group!r}", "`id -Gn` lists yours") from None
