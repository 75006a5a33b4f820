"""A stand-in for scontrol, for jobs of one node that are started by the real attempt.py as a process."""

import os

SCRIPT = """#!/bin/sh
# Stands in for scontrol: a job on one node.
[ "$2" = hostnames ] && echo node1
[ "$2" = job ] && [ -e "$0.cancelled" ] && echo JobState=CANCELLED
exit 0
"""


def installed(folder):
    """The folder, which is made, with the stand-in in it."""
    folder.mkdir()
    (folder / "scontrol").write_text(SCRIPT)
    (folder / "scontrol").chmod(0o755)
    return folder


def environment(folder, run, number):
    """The variables of a job of that number, which finds the stand-in of `folder` first."""
    return os.environ | {
        "PATH": f"{folder}:/bin:/usr/bin",
        "SUPERPOD_RUN_DIR": str(run.path),
        "SLURM_JOB_ID": str(number),
        "SLURM_JOB_NODELIST": "node1",
    }
