"""Measure the wall time of `recipes --help` with a cold page cache, and of `nemo --help`. Target: 0.3 s.

The CPU time, which is also printed, distinguishes a slow start from a busy machine.
"""

import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

TARGET_S = 0.3
RUNS = 7


def seconds(command: list[str], runs: int) -> list[float]:
    """Return the wall time of each of `runs` processes of a command."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        times.append(time.perf_counter() - start)
    return times


def main() -> int:
    here = Path(sys.executable).parent
    if hasattr(os, "posix_fadvise"):
        drop_cached(Path(sys.executable).parents[1] / "lib")
    cold = seconds([str(here / "recipes"), "--help"], 1)[0]
    before = cpu_seconds()
    warm = statistics.median(seconds([str(here / "recipes"), "--help"], RUNS))
    cpu = (cpu_seconds() - before) / RUNS
    print(f"recipes --help   first {cold:.2f} s   median of {RUNS}: {warm:.2f} s   target {TARGET_S} s")
    print(f"                 of CPU time {cpu:.2f} s, the mean of these {RUNS}")
    if (here / "nemo").exists():
        print(f"nemo --help      {seconds([str(here / 'nemo'), '--help'], 1)[0]:.2f} s")
    return 0 if cold < TARGET_S else 1


def cpu_seconds() -> float:
    """Return the CPU time of all child processes so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def drop_cached(folder: Path) -> None:
    """Drop the files below `folder` from the page cache, so that the first start reads the disk."""
    for name in ("typer", "rich", "pydantic", "pydantic_core", "annotated_doc", "shellingham"):
        for path in folder.glob(f"python*/site-packages/{name}/**/*"):
            if path.is_file():
                handle = os.open(path, os.O_RDONLY)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(handle)


if __name__ == "__main__":
    sys.exit(main())
