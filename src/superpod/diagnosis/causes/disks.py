"""Causes: disks and file systems."""

from __future__ import annotations

from superpod.diagnosis.causes.table import GROUND, HINT, LIKELY, PROGRAM, Cause, Sign

CAUSES = (
    Cause(
        "disk_full",
        GROUND,
        "a disk is full",
        "make room where the message names it (`recipes ckpt prune RUN --keep 2`; df -h and df -i of that path; /tmp "
        "and "
        "image caches count), then resume",
        (
            Sign("no space left on device", r"device:? '?/(?!dev/shm)"),
            Sign("no space left on device", sure=LIKELY),  # of an unnamed file: a disk, or /dev/shm
            Sign("enospc", sure=LIKELY),
            Sign("file write failed", r"PytorchStreamWriter failed writing", LIKELY),
            Sign("[errno 28]", sure=LIKELY),
            Sign(
                "disk",
                r"the disk (under .* )?is full|disk full|not enough (free )?(disk )?space|out of disk space",
                sure=LIKELY,
            ),
            Sign("write failed because no space left"),
            Sign("are free under", r"a checkpoint takes"),
        ),
        follows=("shared_memory_full",),
    ),
    Cause(
        "quota",
        GROUND,
        "your quota of that file system is used up, in bytes or in files",
        "`quota -s` or `lfs quota -u $USER PATH` shows it; `recipes ckpt prune RUN --keep 2`, or another folder for "
        "runs "
        "and caches (folders.runs, HF_HOME, TRITON_CACHE_DIR); then resume",
        (
            Sign("quota exceeded"),
            Sign("edquot"),
            Sign("[errno 122]"),
            Sign("your quota is used up"),
            Sign("exceeded", r"quota"),
        ),
    ),
    Cause(
        "read_only",
        GROUND,
        "a file system is mounted read-only, or went read-only after an error",
        "write somewhere else, mount it rw (container.mounts without :ro); a disk that turned read-only needs its "
        "owner",
        (Sign("read-only file system"), Sign("[errno 30]"), Sign("erofs")),
    ),
    Cause(
        "filesystem_error",
        GROUND,
        "a shared file system failed or was away",
        "the file system's state on that node (df, dmesg | grep -iE 'nfs|lustre|gpfs'); then resume",
        (
            Sign("stale file handle"),
            Sign("stale nfs file handle"),
            Sign("[errno 116]"),
            Sign("input/output error"),
            Sign("[errno 5]"),
            Sign("transport endpoint is not connected"),
            Sign("[errno 107]", sure=LIKELY),
            Sign("cannot send after transport endpoint shutdown"),
            Sign("[errno 108]"),
            Sign("lustreerror", any_level=True, alone=False, sure=LIKELY),
            Sign("nfs: server", r"not responding", LIKELY, True, True),
            Sign("remote i/o error"),
            Sign("structure needs cleaning"),
            Sign("[errno 110] connection timed out", sure=LIKELY),
            Sign("i/o error", r"(read|write|blk|device|sector)", LIKELY),
        ),
    ),
    Cause(
        "permission",
        PROGRAM,
        "a file or folder may not be read or written by this user",
        "ls -ld of the path and the folders above it, on the node and as the user of the job (root is squashed on NFS)",
        (
            Sign(
                "permission denied",
                r"^(?!.*publickey|.*please try again)"
                r".*(Errno 13|PermissionError|mkdir|open|cannot|access|write|create|: Permission denied"
                r"|IOError|OSError)",
            ),
            Sign("permissionerror"),
            Sign("[errno 13]"),
            Sign("operation not permitted", r"(Errno 1\]|chmod|chown|PermissionError)", LIKELY),
        ),
    ),
    Cause(
        "file_locks",
        PROGRAM,
        "the file system has no file locks, or another process holds the lock",
        "HF_HOME, TRITON_CACHE_DIR and caches on a local disk or a file system with flock",
        (
            Sign("no locks available"),
            Sign("[errno 37]"),
            Sign("has no file locks"),
            Sign("could not acquire lock", sure=LIKELY),
            Sign("filelock", r"Timeout|could not be acquired", LIKELY),
            Sign("database is locked"),
        ),
    ),
    Cause(
        "file_missing",
        PROGRAM,
        "a file or folder that the run was pointed to is not there, on that node or in its container",
        "ls of the path on the node; in a container, container.mounts must have it; `recipes cluster check PROFILE`",
        (
            Sign(
                "no such file or directory",
                r"^(?!.*shared object)"
                r".*(FileNotFoundError|Errno 2\]|can't open file|(cannot|unable to) (open|access|stat)|not found)",
                LIKELY,
            ),
            Sign("filenotfounderror", sure=LIKELY),
            Sign("notadirectoryerror", sure=LIKELY),
            Sign("does not exist", r"(file|folder|director|path)", HINT),
            Sign("not found", r"\b(file|folder|directory|path)\b.* not found", HINT),
            Sign("isadirectoryerror", sure=LIKELY),
            Sign("fileexistserror", sure=HINT),
        ),
        follows=("filesystem_error", "disk_full", "checkpoint_missing", "data_missing", "tokenizer_missing"),
    ),
)
