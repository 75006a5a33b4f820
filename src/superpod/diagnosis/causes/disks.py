"""Causes: disks and file systems."""

from __future__ import annotations

from superpod.diagnosis.causes.table import GROUND, HINT, LIKELY, PROGRAM, Cause, Sign

CAUSES = (
    Cause(
        "disk_full",
        GROUND,
        "a disk is full",
        "free space where the message says (`recipes ckpt prune RUN --keep 2`; check df -h and df -i of that "
        "path, /tmp and image caches), then resume",
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
            Sign("are free under", r"a checkpoint (needs|takes)"),
        ),
        follows=("shared_memory_full",),
    ),
    Cause(
        "quota",
        GROUND,
        "your quota on that file system is exceeded, in bytes or in files",
        "check it with `quota -s` or `lfs quota -u $USER PATH`; run `recipes ckpt prune RUN --keep 2`, or "
        "move runs and caches (folders.runs, HF_HOME, TRITON_CACHE_DIR); then resume",
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
        "a file system is mounted read-only, or became read-only after an error",
        "write elsewhere, or mount it read-write (container.mounts without :ro); its administrator must "
        "repair a disk that became read-only",
        (Sign("read-only file system"), Sign("[errno 30]"), Sign("erofs")),
    ),
    Cause(
        "filesystem_error",
        GROUND,
        "a shared file system failed or was unavailable",
        "check the file system on that node (df, dmesg | grep -iE 'nfs|lustre|gpfs'); then resume",
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
        "this user has no permission to read or write a file or folder",
        "check ls -ld of the path and its parent folders on the node, as the user of the job (NFS may squash root)",
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
        "the file system does not support file locks, or another process holds the lock",
        "put HF_HOME, TRITON_CACHE_DIR and other caches on a local disk or a file system mounted with flock",
        (
            Sign("no locks available"),
            Sign("[errno 37]"),
            Sign("has no file locks"),
            Sign("does not support file locks"),
            Sign("could not acquire lock", sure=LIKELY),
            Sign("filelock", r"Timeout|could not be acquired", LIKELY),
            Sign("database is locked"),
        ),
    ),
    Cause(
        "file_missing",
        PROGRAM,
        "a file or folder of the run does not exist on that node or in its container",
        "check the path with ls on the node; container.mounts must include it; `recipes cluster check PROFILE`",
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
