"""Causes: disks and file systems."""

from __future__ import annotations

from superpod.diagnosis.causes.table import GROUND, HINT, LIKELY, PROGRAM, Cause, Pattern, phrases

CAUSES = (
    Cause(
        "disk_full",
        GROUND,
        "a disk is full",
        "run `df -h` and `df -i` on the path in the message, on /tmp and on the image cache; free up space, for "
        "example with `recipes ckpt prune RUN --keep 2`; then resume",
        (
            Pattern("no space left on device", r"device:? '?/(?!dev/shm)"),
            Pattern("no space left on device", sure=LIKELY),  # the file is unknown: a disk, or /dev/shm
            Pattern("enospc", sure=LIKELY),
            Pattern("file write failed", r"PytorchStreamWriter failed writing", LIKELY),
            Pattern(
                "disk",
                r"the disk (under .* )?is full|disk full|not enough (free )?(disk )?space|out of disk space",
                sure=LIKELY,
            ),
            Pattern("write failed because no space left"),
            Pattern("are free under", r"a checkpoint (needs|takes)"),
        ),
        follows=("shared_memory_full",),
    ),
    Cause(
        "quota",
        GROUND,
        "your quota on the file system is exceeded, in bytes or in number of files",
        "check the quota with `quota -s` or `lfs quota -u $USER PATH`; run `recipes ckpt prune RUN --keep 2`, or "
        "move runs and caches (folders.runs, HF_HOME, TRITON_CACHE_DIR); then resume",
        (
            *phrases("edquot", "your quota is used up"),
            Pattern("exceeded", r"quota"),
        ),
    ),
    Cause(
        "read_only",
        GROUND,
        "a file system is mounted read-only, or became read-only after an error",
        "write to another file system, or mount this one read-write (container.mounts without :ro); if it became "
        "read-only after an error, its administrator must repair it",
        (Pattern("read-only file system"), Pattern("[errno 30]"), Pattern("erofs")),
    ),
    Cause(
        "filesystem_error",
        GROUND,
        "a shared file system failed or was unavailable",
        "check the file system on the node with `df` and `dmesg | grep -iE 'nfs|lustre|gpfs'`; then resume",
        (
            Pattern("stale ", r"stale (NFS )?file handle"),
            *phrases("input/output error", "transport endpoint is not connected"),
            *phrases("cannot send after transport endpoint shutdown", "remote i/o error", "structure needs cleaning"),
            Pattern("lustreerror", any_level=True, alone=False, sure=LIKELY),
            Pattern("nfs: server", r"not responding", LIKELY, any_level=True),
            Pattern("[errno 110] connection timed out", sure=LIKELY),
            Pattern("i/o error", r"(read|write|blk|device|sector)", LIKELY),
        ),
    ),
    Cause(
        "permission",
        PROGRAM,
        "you do not have permission to read or write a file or folder",
        "run `ls -ld` on the path and its parent folders on the node, as the user of the job (NFS may squash root)",
        (
            Pattern(
                "permission denied",
                r"^(?!.*publickey|.*please try again)"
                r".*(Errno 13|PermissionError|mkdir|open|cannot|access|write|create|: Permission denied"
                r"|IOError|OSError)",
            ),
            *phrases("permissionerror", "[errno 13]"),
            Pattern("operation not permitted", r"(Errno 1\]|chmod|chown|PermissionError)", LIKELY),
        ),
    ),
    Cause(
        "file_locks",
        PROGRAM,
        "the file system does not support file locks, or another process holds the lock",
        "put HF_HOME, TRITON_CACHE_DIR and other caches on a local disk or a file system mounted with flock",
        (
            *phrases("no locks available", "has no file locks", "does not support file locks", "database is locked"),
            Pattern("could not acquire lock", sure=LIKELY),
            Pattern("filelock", r"Timeout|could not be acquired", LIKELY),
        ),
    ),
    Cause(
        "file_missing",
        PROGRAM,
        "a file or folder of the run does not exist on the node or in the container",
        "check the path with `ls` on the node; container.mounts must include it (`recipes cluster check PROFILE`)",
        (
            Pattern(
                "no such file or directory",
                r"^(?!.*shared object)"
                r".*(FileNotFoundError|Errno 2\]|can't open file|(cannot|unable to) (open|access|stat)|not found)",
                LIKELY,
            ),
            *phrases("filenotfounderror", "notadirectoryerror", "isadirectoryerror", sure=LIKELY),
            Pattern("fileexistserror", sure=HINT),
        ),
        follows=("filesystem_error", "disk_full", "checkpoint_missing", "data_missing", "tokenizer_missing"),
        message_topics=r"\bno such file\b|\bnot found at\b|\b(file|folder|directory|path)\b.*\b(not found|not exist)\b",
    ),
)
