"""Measure the time of a rehearsal and its parts: TP 2 x PP 2 x DP 2 on 8 ranks, 10 steps, all of its runs.

    python benchmarks/rehearse.py [SHAPE]      default: the recipe of TP 2 x PP 2 x DP 2

Fails if the rehearsal, with the import of NeMo, exceeds the target of 120 s on 2 cores.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

STARTED = time.time()
TARGET_S, STEPS = 120.0, 10
SHAPE = "biases-of-q-k-v-tp-x-pp-x-dp-fp8"


def main() -> None:
    """Run the rehearsal, and print its time."""
    from superpod.common.quiet import silence_libraries
    from superpod.rehearsal import features, rehearsal_run
    from superpod.requests.request import Request

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    key = sys.argv[1] if len(sys.argv) > 1 else SHAPE
    case = features.find_recipe(next(shape for shape in features.FEATURES if shape.key == key))
    planned = rehearsal_run.plan_rehearsal(Request(case.recipe, num_nodes=case.nodes), features.MOST_RANKS)
    folder = Path(tempfile.mkdtemp(prefix="recipes-rehearse-"))
    with silence_libraries(folder / "rehearse.log"):
        rehearsal_run.run_rehearsal(planned, folder, STEPS)
    total = time.time() - STARTED
    print(f"{case.recipe} at {case.nodes} nodes: {planned.shrunk.topology}, {planned.shrunk.job.gpus} ranks", end=", ")
    print(f"{os.cpu_count()} cores, {STEPS} steps: {total:.0f} s of {TARGET_S:.0f} s")
    for line in parts(planned, total):
        print(line)
    failed = [f"{check.name}: {check.message}" for check in planned.checks if not check.passed]
    if not failed:
        shutil.rmtree(folder, ignore_errors=True)
    if failed or total > TARGET_S:
        sys.exit(f"failed: {'; '.join(failed) or 'too slow'} ({folder})")


def parts(done: object, total: float) -> list[str]:
    """Return a line for the work that is done once, one per run, and one for the rest."""
    seconds, runs = done.seconds, done.runs  # type: ignore[attr-defined]
    lines = [f"  {'importing NeMo, building the recipe':<36}{seconds['import and build']:6.1f} s"]
    for name, run in runs.items():
        seen, began = run.ranks[0], run.began
        ready, ends = seen["started"], seen["step_ends"]
        spent = f"start {seen['built'] - began:.1f}, model and weights {ready - seen['built']:.1f}, "
        spent += f"{len(ends)} steps {ends[-1] - ready:.1f}, end and save {began + run.seconds - ends[-1]:.1f}"
        lines.append(f"  {f'{name}: {len(run.ranks)} ranks':<36}{run.seconds:6.1f} s: {spent}")
    rest = total - sum(seconds.values())
    return [*lines, f"  {'the rest: Python, the planner, text':<36}{rest:6.1f} s"]


if __name__ == "__main__":
    main()
