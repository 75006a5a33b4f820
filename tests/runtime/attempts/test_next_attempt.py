"""A job that submits the next one itself (`chain.self_submit`): the real attempt.py, scripts as Slurm's commands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from superpod.runtime.attempts import attempt
from superpod.runtime.health import node_checks

REFUSAL = "sbatch: error: Batch job submission failed: Requested node configuration is not available"


@pytest.fixture
def job(run, tmp_path):
    """Runs one job of the run, whose node has a bad GPU or not, and whose sbatch takes jobs or not."""
    fake, calls = tmp_path / "fake", tmp_path / "calls"
    fake.mkdir()
    (run.path / "job.sbatch").write_text('#!/bin/bash\n#SBATCH --exclude="node[7-8]"    # the site\n')

    def start(*, checks: str = "ok", takes: bool = True, queued: str = "") -> tuple[str, list[str]]:
        scripts = {
            "scontrol": '[ "$2" = hostnames ] && echo node1; exit 0',
            "squeue": f"echo {queued}",
            "srun": f"printf '0: gpus\\t{checks}\\tGPU 3 has memory errors\\n'",
            "sbatch": f'echo "$@" >>{calls}; {"echo 8" if takes else f"echo {REFUSAL!r} >&2; exit 1"}',
        }
        for name, text in scripts.items():
            (fake / name).write_text(f"#!/bin/sh\n{text}\n")
            (fake / name).chmod(0o755)
        words = ["--recipe", run.recipe, "--runs", str(run.path.parents[1]), "--self-submit", "--checks", "gpus"]
        environment = os.environ | {"PATH": f"{fake}:/bin:/usr/bin", "SUPERPOD_RUN_DIR": str(run.path)}
        environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_JOB_NAME": "x"}
        command = [sys.executable, str(Path(attempt.__file__)), *words, "--", "sh", "-c", "exit 3"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        return done.stdout, calls.read_text().splitlines() if calls.exists() else []

    return start


def test_after_bad_nodes_the_next_job_is_submitted_without_them(job, run):
    """It had no job in the queue to be given other nodes, and none followed, without a word."""
    printed, submitted = job(checks="bad")
    [words] = submitted
    assert words.endswith(f" --exclude=node[7-8],node1 {run.path}/job.sbatch"), "the site's exclusions stay"
    assert run.attempts[0].result["state"] == "requeued"
    assert "bad nodes, excluded from the next attempt: node1: gpus: GPU 3 has memory errors" in printed


def test_after_bad_nodes_a_job_that_waits_already_gets_others(job, run):
    _, submitted = job(checks="bad", queued="9")
    assert submitted == []
    assert node_checks.excluded_nodes(run) == ["node[7-8]", "node1"]


@pytest.mark.parametrize(("checks", "state"), [("bad", "requeued"), ("ok", "failed")])
def test_a_next_job_that_slurm_refuses_is_said_with_its_words(checks, state, job, run):
    """The chain ended, and only an empty queue told it."""
    printed, submitted = job(checks=checks, takes=False)
    assert len(submitted) == 1
    [result] = [a.result for a in run.attempts]
    assert result["state"] == state
    says = "sbatch rejected the next job (Batch job submission failed: Requested node configuration is not available)"
    assert f"{says}; submit it with `recipes top-up {run.path}`" in result["message"]
    assert says in printed


def test_without_bad_nodes_the_script_says_who_is_left_out(job, run):
    _, [words] = job()
    assert "--exclude" not in words
