"""Check the ownership of runs. A run belongs to the owner of its folder, and only that user may change it.

Several users may share a folder for runs. A job executes code from its run folder and unpickles checkpoints in it, so
no other user may be able to write into a run or to replace it. The owner of a folder can rename its entries; without
the sticky bit, so can every user with write permission. The owner of the folder for runs is trusted like root.
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
    """Return the uid of a run folder's owner; None if it is unknown.

    A file system that cannot map owners (NFS with root squash or without id mapping, a user namespace) reports the
    kernel's overflow uid, usually 65534, for all of them (proc_sys_kernel(5)).
    """
    try:
        uid = run.stat().st_uid
    except OSError:
        return None
    return None if uid == _overflow_uid() else uid


def is_mine(run: Path) -> bool:
    """Return whether this user owns a run folder. True if the owner is unknown."""
    return owner_uid(run) in (None, os.geteuid())


def user_name(uid: int | None) -> str:
    """Return the name of the user `uid`, the uid if it has no name, or '?' for None."""
    if uid is None:
        return "?"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def refuse_others(run: Path, action: str, *, root_may: bool = True) -> None:
    """Raise UserError unless this user owns a run, or is root and `root_may`.

    `action` completes the message "only OWNER may ...". Root may stop a run and free its disk space, but jobs that root
    submits would run as root.
    """
    owner, user = owner_uid(run), os.geteuid()
    if owner in (None, user) or (root_may and user == 0):
        return
    name = user_name(owner)
    raise UserError(
        f"{run} belongs to {name}, but you are {user_name(user)}: only {name} may {action}",
        f"ask {name}, or start a run of your own",
    )


@contextlib.contextmanager
def restrict_umask() -> Iterator[None]:
    """Deny group and others write permission to files and folders that are created within the block."""
    # The umask can only be read by setting it. In between, a stricter umask does no harm.
    old_umask = os.umask(0o077)
    os.umask(old_umask | 0o022)
    try:
        yield
    finally:
        os.umask(old_umask)


def folder_in(shared: Path, name: str) -> Path:
    """Return this user's folder in the folder `shared`: `name`, or if another user has it, `name.USER`.

    The folder is created if it does not exist.

    Raises:
        UserError: other users could replace entries of `shared`, or both names are in use by others.
        OSError: the folder cannot be created.
    """
    shared.mkdir(parents=True, exist_ok=True)
    _refuse(
        shared, _problem_of_shared(shared), f"run `chmod +t {shlex.quote(str(shared))}`, or use a folder that you own"
    )
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
    raise UserError(f"cannot create a folder for you in {shared}: {', '.join(problems)}", "use a folder that you own")


def refuse_unsafe(run: Path) -> None:
    """Refuse to execute code from a run that another user could have written or could replace.

    Raises:
        UserError: the run belongs to another user.
        UnsafeError: another user can write to one of its folders or files; the message gives a fix.
    """
    refuse_others(run, "train it", root_may=False)
    refuse_replaceable(run)
    refuse_writable(run, *(run / name for name in ("run.json", "job.sbatch", "attempts", "checkpoints")))


def refuse_replaceable(path: Path) -> None:
    """Raise UnsafeError if another user could replace a run, or a folder that `folder_in` returned."""
    for where in dict.fromkeys([path.absolute(), path.resolve()]):
        parent, shared = where.parent, where.parent.parent
        _refuse(shared, _problem_of_shared(shared), f"run `chmod +t {shlex.quote(str(shared))}`")
        target = shlex.quote(str(shared / f"{parent.name}.{user_name(os.geteuid())}"))
        hint = f"move it to a folder that you own: `mkdir {target} && mv {shlex.quote(str(where))} {target}`"
        _refuse(parent, _problem(parent, trusted=shared.stat().st_uid, sticky=True), hint)


def refuse_unsafe_checkpoint(checkpoint: Path) -> None:
    """Raise UnsafeError if another user could have written a checkpoint, which NeMo unpickles and executes."""
    names = ("weights", "weights/.metadata", "weights/common.pt", "context", "context/io.json")
    # One shard suffices, since all were created with the same umask.
    shard = next((checkpoint / "weights").glob("*.distcp"), checkpoint)
    refuse_writable(checkpoint, *(checkpoint / name for name in names), shard)


def refuse_writable(*paths: Path) -> None:
    """Raise UnsafeError for the first of `paths` that another user owns or can write to. Missing paths are ignored."""
    for path in paths:
        if os.path.lexists(path) and path.exists():
            hint = f"check whether others have changed it, then run `chmod -R go-w {shlex.quote(str(path))}`"
            _refuse(path, _problem(path, trusted=os.geteuid(), sticky=False), hint)


def may_cache(folder: Path) -> bool:
    """Return whether only this user and root can write to `folder` and its parent, and this user can create `folder`.

    The folder above the parent may be shared if it has the sticky bit.
    """
    if not folder.exists() and not os.access(next(path for path in folder.parents if path.exists()), os.W_OK):
        return False
    checked = ((folder, False), (folder.parent, False), (folder.parent.parent, True))
    return not any(_problem(path, trusted=0, sticky=sticky) for path, sticky in checked if path.exists())


def _refuse(path: Path, problem: str, hint: str) -> None:
    """Raise UnsafeError about `path` unless `problem` is ''."""
    if problem:
        raise UnsafeError(f"{path} {problem}: another user could make this run execute arbitrary code", hint)


def _problem_of_shared(shared: Path) -> str:
    """Return the reason why other users can replace entries of a shared folder; '' if they cannot."""
    return _problem(shared, trusted=shared.stat().st_uid, sticky=True, link_too=False)


def _problem(path: Path, *, trusted: int, sticky: bool, link_too: bool = True) -> str:
    """Return the reason why a user other than root, the uid `trusted` and this user can change `path`; '' if none can.

    With `sticky`, a folder with the sticky bit may be writable by others, since they can only create entries of their
    own. With `link_too`, a symbolic link must not belong to another user either.
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
    """Return whether a group is this user's private group: it has the name of the user and no other members."""
    try:
        group, me = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == me.pw_name and set(group.gr_mem) <= {me.pw_name}


def _overflow_uid() -> int:
    """Return the uid that the kernel reports for owners that it cannot map."""
    try:
        return int(_OVERFLOW_UID.read_text())
    except (OSError, ValueError):
        return 65534
