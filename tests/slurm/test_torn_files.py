"""A truncated file of a run fails no command and costs no attempt."""

import json
from pathlib import Path

import pytest

from superpod.cli.cluster import top_up
from superpod.cli.runs import history
from superpod.common.json_files import write_json
from superpod.reports.runs import attempts as attempt_views
from superpod.runtime.attempts import diagnose, guard
from superpod.runtime.runs import run_state
from superpod.runtime.runs.run_folder import RunFolder
from superpod.runtime.runs.run_state import State
from superpod.slurm.submission import submit
from tests.slurm.fake_slurm import FakeSlurm
from tests.slurm.slurm_runs import seen, submitted, with_attempt

CONTENTS = {
    "empty": b"",
    "torn": b'{"attempt": "001", "jo',
    "zeros, as after a power cut": bytes(512),
    "not text": b"\xff\xfe\x00{",
    "a list": b"[1, 2]\n",
    "null": b"null\n",
    "an empty object": b"{}\n",
    "other types": json.dumps(
        {"state": 5, "jobs": 7, "after": [], "job": None, "started": "x", "before": "y", "resume": 1, "layouts": 2,
         "message": {}, "nodes": 3, "at": "soon", "step": None, "files": 1, "checkpoint": [], "ended": "no"}
    ).encode(),
}  # fmt: skip

FILES = ("attempts/001/result.json", "attempts/001/deadline.json", "attempts/001/env.json", run_state.CHAIN)
FILES += (
    run_state.RESUMED,
    "plan.json",
    "saved.jsonl",
    "metrics.jsonl",
    "bad_nodes.json",
    "attempts/001/heartbeat/0.jsonl",
)


def failed_run(runs: Path, slurm: FakeSlurm) -> RunFolder:
    """A run whose only job has failed, with every small file."""
    run = submitted(runs)
    with_attempt(run, slurm.add(submit.job_name(str(run.path)), "FAILED", job="100"), "failed")
    for name in FILES:
        if not (run.path / name).exists():
            write_json(run.path / name, {})
    return run


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.slow
def test_truncated_file_fails_no_command_and_run_continues(name, content, tmp_path, slurm, capsys):
    run = failed_run(tmp_path / "runs", slurm)
    (run.path / name).write_bytes(CONTENTS[content])
    assert seen(run).state != State.UNREADABLE, seen(run).message
    run.status()
    diagnose.summarize(run, run.attempts[-1])
    attempt_views.read_attempt(run.attempts[-1])
    history.history(str(run.path))
    history.history(str(run.path), as_json=True)
    assert guard.reason_to_stop(RunFolder(run.path), 2, 20) is None
    top_up.top_up([str(run.path)])
    assert "queued 3 more" in capsys.readouterr().out
    assert len(slurm.calls("sbatch")) == 3
    assert set(guard.chained_jobs(run)) >= {"101", "102", "103"}, "noted for the job that ends the run"
