"""A job of a fine-tuning run imports before its ranks and exports after them, by the real attempt.py as a process.

A stand-in for scontrol names one node; ranks and steps are shell commands that leave a mark of what they are called as.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from superpod.runtime.attempts import attempt, model_steps
from superpod.runtime.runs import pending_export
from superpod.runtime.runs.run_folder import RunFolder
from tests.runtime import fake_scontrol

DONE = 'echo ranks >>"$SUPERPOD_RUN_DIR/order"; echo "{\\"step\\": 9}" >"$SUPERPOD_RUN_DIR/done"'
STEP = """
echo "$1" >>"$2/order"
[ -e "$2/fail-$1" ] && { echo "no room for $1"; exit 1; }
[ -e "$2/hang-$1" ] && { trap 'echo stopped >>"$2/order"; exit 1' TERM; echo $$ >"$2/hangs"; sleep 60 & wait; }
[ $1 = import ] && mkdir -p "$2/base"
[ $1 = export ] && echo '{"folder": "hf"}' >"$2/exported.json"
exit 0
"""


@pytest.fixture
def tuned(tmp_path):
    run = RunFolder.create(tmp_path / "runs", "tiny_llama3_sft", facts={}, recipe_lines=[])
    run.update({model_steps.BASE: str(run.path / "base"), pending_export.EXPORTS_TO: "hf", "finetune": {}}, [])
    return run


@pytest.fixture
def started(tuned, tmp_path):
    """Starts one job of the run; returns its process."""
    fake = fake_scontrol.installed(tmp_path / "fake")
    words = ["--recipe", tuned.recipe, "--runs", str(tuned.path.parents[1]), "--second-look-s", "0"]
    words += ["--", "sh", "-c", DONE, "--", "sh", "-c", STEP, "step"]

    def start(number: int) -> subprocess.Popen:
        environment = fake_scontrol.environment(fake, tuned, number)
        command = [sys.executable, str(Path(attempt.__file__)), *words]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    return start


def order(run):
    return (run.path / "order").read_text().split()


def hanging(run) -> int:
    """The process of the step that hangs, once its trap is set."""
    deadline = time.time() + 60
    while time.time() < deadline:
        if (run.path / "hangs").exists() and (text := (run.path / "hangs").read_text()):
            return int(text)
        time.sleep(0.05)
    raise AssertionError(f"no step hangs: {order(run)}")


def test_the_model_is_imported_before_the_ranks_and_exported_after_them(tuned, started):
    job = started(1)
    text, _ = job.communicate(timeout=60)
    assert job.returncode == 0, text
    assert order(tuned) == ["import", "ranks", "export"]
    assert (tuned.state(), tuned.attempts[-1].result["state"]) == ("done", "done")


def test_a_model_that_is_imported_already_is_not_imported_twice(tuned, started):
    (tuned.path / "base").mkdir()
    started(1).communicate(timeout=60)
    assert order(tuned) == ["ranks", "export"]


def test_a_failed_import_ends_the_attempt_with_its_words_and_starts_no_ranks(tuned, started):
    (tuned.path / "fail-import").touch()
    job = started(1)
    text, _ = job.communicate(timeout=60)
    assert job.returncode == 1
    assert order(tuned) == ["import"]
    assert "the model was not imported: no room for import" in text
    assert "no room for import" in tuned.attempts[-1].result["message"]


def test_a_failed_export_is_no_done_and_the_next_job_exports_alone(tuned, started):
    (tuned.path / "fail-export").touch()
    job = started(1)
    assert (job.communicate(timeout=60), job.returncode)[1] == 1
    status = tuned.status()
    assert status.state == "failed"
    assert "trained, but no room for export" in status.message
    (tuned.path / "fail-export").unlink()
    job = started(2)
    text, _ = job.communicate(timeout=60)
    assert job.returncode == 0, text
    assert order(tuned) == ["import", "ranks", "export", "export"]
    assert tuned.state() == "done"
    job = started(3)
    assert "is done" in job.communicate(timeout=60)[0]


def test_a_job_that_is_ended_while_it_imports_ends_its_step(tuned, started):
    (tuned.path / "hang-import").touch()
    job = started(1)
    hanging(tuned)
    assert json.loads((tuned.attempts[-1].path / "result.json").read_text())["message"] == "importing the model"
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    assert order(tuned) == ["import", "stopped"]
    assert tuned.attempts[-1].result["state"] == "requeued"


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_job_that_is_cancelled_while_it_exports_ends_its_run(is_cancelled, tuned, started, tmp_path):
    """The next job of the chain exported; after a requeue it does."""
    (tuned.path / "hang-export").touch()
    job = started(1)
    step = hanging(tuned)
    if is_cancelled:
        (tmp_path / "fake" / "scontrol.cancelled").touch()
    for pid in (job.pid, step):  # as Slurm does: the script and its steps
        os.kill(pid, signal.SIGTERM)
    (tuned.path / "hang-export").unlink()
    job.communicate(timeout=60)
    assert tuned.attempts[-1].result["state"] == ("cancelled" if is_cancelled else "requeued")
    text, _ = started(2).communicate(timeout=60)
    assert ("is stopped: job 1 was cancelled" in text) == is_cancelled
    assert order(tuned).count("export") == (1 if is_cancelled else 2)


def test_a_command_without_a_second_one_has_no_step():
    assert model_steps.split(["srun", "rank"]) == (["srun", "rank"], [])
    assert model_steps.split(["srun", "rank", "--", "srun", "step"]) == (["srun", "rank"], ["srun", "step"])
