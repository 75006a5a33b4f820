"""Run folders as they are after a submission to Slurm."""

import hashlib
import os
import time
from pathlib import Path

import pytest

from superpod.common.json_files import append_line, write_json
from superpod.runtime.runs import run_state
from superpod.runtime.runs.run_folder import RunFolder
from superpod.slurm.status import run_views
from superpod.slurm.submission import connection, submit
from tests.conftest import NAME

SOMEBODY = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes the owner of a folder")


def submitted(runs: Path, recipe: str = NAME, *, attempts: int = 3) -> RunFolder:
    """Create a run in its state after `recipes submit`."""
    facts = {"attempts": attempts, "max_steps": 100, "nodes": 2, "gpus_per_node": 8}
    run = RunFolder.create(runs, recipe, facts=facts, recipe_lines=["a = 1"])
    (run.path / submit.SCRIPT).write_text("#!/bin/bash\n")
    write_json(run.path / run_state.CHAIN, {"jobs": ["100"]})
    return run


def with_attempt(run: RunFolder, job: str, state: str = "running"):
    attempt = run.new_attempt(job=job)
    append_line(attempt.path / "heartbeat" / "0.jsonl", {"t": time.time(), "step": 3, "phase": "train"})
    (attempt.path / "logs" / "0.0.log").write_text("a line\n")
    if state != "running":
        attempt.finish(state, message="the time limit is near")
    return attempt


def snapshot(folder: Path) -> dict[str, tuple]:
    """Every file and folder: kind, owner, rights, size, times, contents; all but the time of the last reading."""
    paths = [folder, *sorted(folder.rglob("*"))]
    stats = {path: path.lstat() for path in paths}
    return {
        str(path): (s.st_mode, s.st_uid, s.st_gid, s.st_size, s.st_mtime_ns, s.st_ctime_ns, _digest(path))
        for path, s in stats.items()
    }


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def seen(run: RunFolder) -> run_views.RunView:
    return run_views.summarize_runs([run], connection.Connection())[0]
