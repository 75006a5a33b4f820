"""Query the pending jobs of a run, and submit the next one from inside a job if the cluster permits it.

Standard library only.
"""

from __future__ import annotations

import os
import re
import subprocess

from superpod.diagnosis import job_end
from superpod.runtime.health import node_checks
from superpod.runtime.runs.run_folder import RunFolder

TIMEOUT_S = 60.0


def pending_jobs() -> list[str]:
    """Return the ids of the run's pending jobs, which are those of this user with the name of this job."""
    name = os.environ.get("SLURM_JOB_NAME", "")
    return job_end.slurm_output("squeue", "--me", "-h", "-t", "PENDING", f"--name={name}", "-o", "%i").split()


def submit(run: RunFolder, *options: str) -> str:
    """Submit the next job of the run with additional sbatch `options`; return an error message, or '' on success.

    The job excludes the bad nodes of the run.
    """
    folder = str(run.path)
    os.environ["SUPERPOD_RUN_DIR"] = folder
    name = f"--job-name={os.environ.get('SLURM_JOB_NAME', '')}"
    output = f"--output={folder.replace('%', '%%')}/slurm-%j.out"  # sbatch expands % in a path
    arguments = ["--parsable", name, "--export=ALL", "--dependency=singleton", f"--chdir={folder}", output, *options]
    excluded_nodes = node_checks.excluded_nodes(run)
    if excluded_nodes:
        arguments.append(f"--exclude={','.join(excluded_nodes)}")
    try:
        process = subprocess.run(
            ["sbatch", *arguments, f"{folder}/job.sbatch"], capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return _submission_error(str(error), run)
    if process.returncode == 0 and process.stdout.strip():
        return ""
    return _submission_error(process.stderr or f"exit code {process.returncode}", run)


def _submission_error(text: str, run: RunFolder) -> str:
    last = re.sub(r"^sbatch: (error: )?", "", text.strip().rpartition("\n")[2])
    return f"sbatch rejected the next job ({last}); submit it with `recipes top-up {run.path}`"
