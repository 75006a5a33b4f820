"""Nsight Systems around a rank of a Slurm job: the rank starts itself anew under `nsys profile`, in the same process.

NeMo's callback in the recipe marks the steps (`profiling.py`); nsys records between its marks. Local runs are
started under nsys by NeMo-Run.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import MutableMapping
from pathlib import Path

RANKS = "SUPERPOD_NSYS_RANKS"
"""The ranks that run under nsys, separated by commas."""
FOLDER = "profile"
"""In RUN."""
OPTIONS = (
    *("profile", "-s", "none", "-t", "nvtx,cuda", "--force-overwrite=true", "--capture-range=cudaProfilerApi"),
    *("--capture-range-end=stop", "--cuda-graph-trace=node", "--cuda-event-trace=false", "--export=sqlite"),
)
"""As NeMo-Run 0.11.1 has them (core/execution/launcher.py), and the SQLite file that `recipes profile show` reads."""


def take_over(environ: MutableMapping[str, str] = os.environ) -> None:
    """Start this rank anew under nsys, if it is one of those that `RANKS` names; without nsys, say so and go on.

    Called before anything is imported or bound, so that nothing is done twice.
    """
    rank = environ["RANK"]
    if rank not in environ.pop(RANKS, "").split(","):
        return
    nsys = shutil.which("nsys", path=environ.get("PATH"))
    if nsys is None:
        print(
            f"no nsys on the PATH of rank {rank}: it trains without a profile; --profile torch needs none", flush=True
        )
        return
    folder = Path(environ["SUPERPOD_RUN_DIR"]) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    # nsys would end by the warning before the time limit; ignored here, it is ignored there, and the rank takes it up.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    sys.stdout.flush()
    command = [nsys, *OPTIONS, "-o", str(folder / f"rank-{rank}"), sys.executable, *sys.argv]
    os.execvpe(nsys, command, dict(environ))
