"""The job that goes on with a run: those that wait in the queue, and the one that a job submits where nodes may.

Standard library only.
"""

from __future__ import annotations

import os
import re
import subprocess

from superpod.node import ending, first_step
from superpod.node.run_folder import RunFolder

ANSWER_S = 60.0


def queued() -> list[str]:
    """Other jobs of this job's run that wait in the queue."""
    name = os.environ.get("SLURM_JOB_NAME", "")
    return ending.printed("squeue", "--me", "-h", "-t", "PENDING", f"--name={name}", "-o", "%i").split()


def submit(run: RunFolder, *options: str) -> str:
    """Queue the next attempt, without the run's bad nodes; returns why Slurm did not take it, '' when it did."""
    folder = str(run.path)
    os.environ["SUPERPOD_RUN_DIR"] = folder
    name = f"--job-name={os.environ.get('SLURM_JOB_NAME', '')}"
    output = f"--output={folder.replace('%', '%%')}/slurm-%j.out"  # sbatch expands % in it
    words = ["--parsable", name, "--export=ALL", "--dependency=singleton", f"--chdir={folder}", output, *options]
    words += [f"--exclude={','.join(nodes)}" for nodes in [first_step.excluded(run)] if nodes]
    try:
        done = subprocess.run(
            ["sbatch", *words, f"{folder}/job.sbatch"], capture_output=True, text=True, timeout=ANSWER_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return _refusal(str(error), run)
    if done.returncode == 0 and done.stdout.strip():
        return ""
    return _refusal(done.stderr or f"it ended with {done.returncode}", run)


def _refusal(words: str, run: RunFolder) -> str:
    last = re.sub(r"^sbatch: (error: )?", "", words.strip().rpartition("\n")[2])
    return f"sbatch did not take the next job ({last}), so none follows until `recipes top-up {run.path}`"
