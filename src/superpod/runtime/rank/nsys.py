"""Profile a rank of a Slurm job with Nsight Systems: the rank replaces itself with `nsys profile` of the same command.

NeMo's callback in the recipe (`profiling.py`) marks the first and last step to record. For local runs, NeMo-Run starts
nsys.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import MutableMapping
from pathlib import Path

RANKS = "SUPERPOD_NSYS_RANKS"
"""Environment variable with the ranks to profile, separated by commas."""
FOLDER = "profile"
"""Folder in the run folder with the profiles."""
OPTIONS = (
    *("profile", "-s", "none", "-t", "nvtx,cuda", "--force-overwrite=true", "--capture-range=cudaProfilerApi"),
    *("--capture-range-end=stop", "--cuda-graph-trace=node", "--cuda-event-trace=false", "--export=sqlite"),
)
"""Options of NeMo-Run 0.11.1 (core/execution/launcher.py), plus the SQLite export that `recipes profile show` reads."""


def exec_under_nsys(environ: MutableMapping[str, str] = os.environ) -> None:
    """If RANKS contains this rank, replace this process with nsys running the same command; without nsys, print a note.

    Call it before any other setup of the rank, which would otherwise run twice.
    """
    rank = environ["RANK"]
    if rank not in environ.pop(RANKS, "").split(","):
        return
    nsys = shutil.which("nsys", path=environ.get("PATH"))
    if nsys is None:
        print(f"rank {rank} is not profiled: nsys is not on its PATH; `--profile torch` does not need nsys", flush=True)
        return
    folder = Path(environ["SUPERPOD_RUN_DIR"]) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    # SIGUSR1, the warning before the time limit, would end nsys, which inherits this setting. The rank handles it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    sys.stdout.flush()
    command = [nsys, *OPTIONS, "-o", str(folder / f"rank-{rank}"), sys.executable, *sys.argv]
    os.execvpe(nsys, command, dict(environ))
