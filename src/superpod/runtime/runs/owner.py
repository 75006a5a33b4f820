"""Check the ownership of runs: a run belongs to the owner of its folder, and only that user may change it.

Several users may share a folder for runs. A job executes code from its run folder and unpickles checkpoints there, so
no other user must be able to write into a run or to replace it. The owner of a folder can rename its entries; without
the sticky bit, so can anyone with write permission. The owner of the folder for runs is trusted like root.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

from superpod.errors import UserError


class UnsafeError(UserError):
    """Another user could make this user execute code."""


_OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")


def owner_uid(run: Path) -> int | None:
    """Return the uid of a run folder's owner; None if it cannot be read or is not mapped.

    A file system that cannot map owners (NFS with root squash or without id mapping, a user namespace) reports the
    kernel's overflow uid for all of them, usually 65534 (proc_sys_kernel(5)).
    """
    try:
        uid = run.stat().st_uid
    except OSError:
        return None
    return None if uid == _overflow_uid() else uid


def is_mine(run: Path) -> bool:
    """Return whether this user owns a run folder; an unknown owner counts as this user."""
    return owner_uid(run) in (None, os.geteuid())


def user_name(uid: int | None) -> str:
    """Return the name of a user; the uid if there is no name, '?' for None."""
    if uid is None:
        return "?"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def refuse_others(run: Path, action: str, *, root_may: bool = True) -> None:
    """Refuse all users except the owner of the run.

    Args:
        run: the run folder.
        action: the operation, for the message.
        root_may: whether root is permitted too. Root may stop a run and free its disk space, but jobs that root submits
            would run as root.

    Raises:
        UserError: with both user names.
    """
    owner, me = owner_uid(run), os.geteuid()
    if owner in (None, me) or (root_may and me == 0):
        return
    name = user_name(owner)
    raise UserError(
        f"{run} belongs to {name}, but you are {user_name(me)}: only {name} may {action}",
        f"ask {name}, or start a run of your own",
    )


@contextlib.contextmanager
def restrict_umask() -> Iterator[None]:
    """Create files and folders without write permission for group and others within the block."""
    # The umask can only be read by setting it; until then, a stricter one does no harm.
    old_umask = os.umask(0o077)
    os.umask(old_umask | 0o022)
    try:
        yield
    finally:
        os.umask(old_umask)


def folder_in(shared: Path, name: str) -> Path:
    """Return this user's folder in a shared folder, created if it is missing: `name`, or else `name.USER`.

    Raises:
        UserError: other users could replace entries of `shared`, or other users use both names.
        OSError: the folder cannot be created.
    """
    shared.mkdir(parents=True, exist_ok=True)
    _refuse(shared, _problem_of_shared(shared), f"chmod +t {shlex.quote(str(shared))}, or use a folder of your own")
    trusted = shared.stat().st_uid
    problems = []
    for path in (shared / name, shared / f"{name}.{user_name(os.geteuid())}"):
        with contextlib.suppress(FileExistsError), restrict_umask():
            path.mkdir()
        problem = _problem(path, trusted=trusted, sticky=True) if path.exists() else "is a dangling link"
        if not problem and not path.is_dir():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        if not problem and os.access(path, os.W_OK | os.X_OK):
            return path
        problems.append(f"{path.name} {problem or 'is not writable by you'}")
    raise UserError(f"cannot create a folder for you in {shared}: {', '.join(problems)}", "use a folder of your own")


def refuse_unsafe(run: Path) -> None:
    """Refuse to execute code from a run that another user could have written or could replace.

    Raises:
        UserError: the run belongs to another user.
        UnsafeError: one of its paths is unsafe; the message gives the reason and a fix.
    """
    refuse_others(run, "train it", root_may=False)
    refuse_replaceable(run)
    refuse_writable(run, *(run / name for name in ("run.json", "job.sbatch", "attempts", "checkpoints")))


def refuse_replaceable(path: Path) -> None:
    """Refuse a run, or a folder returned by `folder_in`, that another user could replace.

    Raises:
        UnsafeError: with the reason and a fix.
    """
    for where in dict.fromkeys([path.absolute(), path.resolve()]):
        parent, shared = where.parent, where.parent.parent
        _refuse(shared, _problem_of_shared(shared), f"chmod +t {shlex.quote(str(shared))}")
        target = shlex.quote(str(shared / f"{parent.name}.{user_name(os.geteuid())}"))
        hint = (
            f"move it to a folder of your own and use it there: mkdir {target} && mv {shlex.quote(str(where))} {target}"
        )
        _refuse(parent, _problem(parent, trusted=shared.stat().st_uid, sticky=True), hint)


def refuse_unsafe_checkpoint(checkpoint: Path) -> None:
    """Refuse a checkpoint that another user could have written: NeMo unpickles it and calls functions named in it.

    Raises:
        UnsafeError: with the path, the reason and a fix.
    """
    names = ("weights", "weights/.metadata", "weights/common.pt", "context", "context/io.json")
    shard = next(
        (checkpoint / "weights").glob("*.distcp"), checkpoint
    )  # one suffices, since all were created with the same umask
    refuse_writable(checkpoint, *(checkpoint / name for name in names), shard)


def refuse_writable(*paths: Path) -> None:
    """Refuse files and folders that another user owns or can write to; missing paths are ignored.

    Raises:
        UnsafeError: with the first such path, the reason and a fix.
    """
    for path in paths:
        if os.path.lexists(path) and path.exists():
            hint = f"check whether others have changed it, then: chmod -R go-w {shlex.quote(str(path))}"
            _refuse(path, _problem(path, trusted=os.geteuid(), sticky=False), hint)


def may_cache(folder: Path) -> bool:
    """Return whether only this user and root can write to `folder`, and this user can create it if it is missing.

    The same must hold for its parent; the folder above that may be shared if it has the sticky bit.
    """
    if not folder.exists() and not os.access(next(path for path in folder.parents if path.exists()), os.W_OK):
        return False
    checked = ((folder, False), (folder.parent, False), (folder.parent.parent, True))
    return not any(_problem(path, trusted=0, sticky=sticky) for path, sticky in checked if path.exists())


def _refuse(path: Path, problem: str, hint: str) -> None:
    if problem:
        raise UnsafeError(f"{path} {problem}: another user could make this run execute arbitrary code", hint)


def _problem_of_shared(shared: Path) -> str:
    return _problem(shared, trusted=shared.stat().st_uid, sticky=True, link_too=False)


def _problem(path: Path, *, trusted: int, sticky: bool, link_too: bool = True) -> str:
    """Return why a user other than root, `trusted` and this user can change `path`; '' if none can.

    If `sticky` is set, a folder with the sticky bit may be writable by others, who can then only create entries of
    their own. A symbolic link must not belong to another user either, unless `link_too` is False.
    """
    facts = path.stat()
    owners = {facts.st_uid, path.lstat().st_uid} if link_too else {facts.st_uid}
    other_owners = owners - {0, os.geteuid(), trusted, _overflow_uid()}
    if other_owners:
        return f"belongs to {user_name(other_owners.pop())}"
    if sticky and facts.st_mode & stat.S_ISVTX:
        return ""
    if facts.st_mode & stat.S_IWOTH:
        return f"is writable by everyone (mode {stat.S_IMODE(facts.st_mode):o})"
    if facts.st_mode & stat.S_IWGRP and not _is_private_group(facts.st_gid):
        return f"is writable by its group (mode {stat.S_IMODE(facts.st_mode):o})"
    return ""


def _is_private_group(gid: int) -> bool:
    """Return whether a group is a user private group: it has the name of the user and no other members."""
    try:
        group, me = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == me.pw_name and set(group.gr_mem) <= {me.pw_name}


def _overflow_uid() -> int:
    try:
        return int(_OVERFLOW_UID.read_text())
    except (OSError, ValueError):
        return 65534
