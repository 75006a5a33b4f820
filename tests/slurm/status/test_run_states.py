"""Commands that show runs change nothing, query Slurm rarely, and show unreadable runs."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from superpod.common.json_files import append_line, write_json
from superpod.reports.runs import run_list
from superpod.reports.runs.logs import LogReader
from superpod.runtime.attempts import guard
from superpod.runtime.runs import owner, run_state
from superpod.slurm.status import mirror, run_views
from superpod.slurm.submission import connection, submit
from tests.conftest import NAME, environment_of
from tests.slurm.slurm_runs import SOMEBODY, needs_root, seen, snapshot, submitted, with_attempt


def recipes(*words) -> subprocess.Popen:
    command = [sys.executable, "-m", "superpod.cli", *map(str, words)]
    return subprocess.Popen(
        command, env=environment_of({}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_parallel_status_commands_change_nothing(tmp_path, slurm):
    run = submitted(tmp_path / "runs")
    with_attempt(run, slurm.add(submit.job_name(str(run.path)), "RUNNING"))
    before, jobs = snapshot(tmp_path / "runs"), slurm.jobs
    verbs = [["status", run.path], ["status", "--runs", tmp_path / "runs"], ["history", run.path], ["logs", run.path]]
    looks = [recipes(*words) for words in (*verbs, verbs[0])]
    outputs = [look.communicate(timeout=120)[0] for look in looks]
    assert [look.returncode for look in looks] == [0] * 5, outputs
    assert "running" in outputs[0]
    assert slurm.calls("sbatch") == []
    assert slurm.jobs == jobs
    assert snapshot(tmp_path / "runs") == before


def test_status_does_not_record_a_cancellation(tmp_path, slurm):
    run = submitted(tmp_path / "runs")
    with_attempt(run, slurm.add(submit.job_name(str(run.path)), "CANCELLED"))
    before = snapshot(run.path)
    assert seen(run).state == "cancelled"
    assert snapshot(run.path) == before
    assert run.stop is None


@needs_root
def test_running_run_of_another_user(tmp_path, slurm):
    run = submitted(tmp_path / "runs")
    with_attempt(run, slurm.add(submit.job_name(str(run.path)), "RUNNING", user=SOMEBODY))
    os.chown(run.path, SOMEBODY, SOMEBODY)
    assert seen(run).state == "running"
    assert seen(run).user == str(SOMEBODY)


def test_parallel_top_ups_queue_missing_jobs_once(tmp_path, slurm):
    run = submitted(tmp_path / "runs", attempts=4)
    with_attempt(run, slurm.add(submit.job_name(str(run.path)), "RUNNING"))
    calls = [recipes("top-up", run.path) for _ in range(2)]
    outputs = [call.communicate(timeout=120)[0] for call in calls]
    queued = [call.returncode for call in calls]
    # The later one finds nothing to queue, or that the first one is at it.
    assert sorted(queued) in ([0, 0], [0, 2]), outputs
    assert len(slurm.jobs) == 4, outputs
    assert sum("queued 3 more jobs: 101, 102, 103" in output for output in outputs) == 1
    assert recipes("top-up", run.path).communicate(timeout=60)[0] == f"{run.path.name}: nothing to queue\n"


def test_stopped_run_is_not_topped_up(tmp_path, slurm):
    run = submitted(tmp_path / "runs")
    with_attempt(run, slurm.add(submit.job_name(str(run.path)), "CANCELLED"))
    call = recipes("top-up", run.path)
    assert "--resume RUN" in call.communicate(timeout=60)[0]
    assert call.returncode == 2
    assert slurm.calls("sbatch") == []


@needs_root
@pytest.mark.parametrize("mine", [True, False])
def test_top_up_of_a_folder_is_limited_to_own_runs(tmp_path, slurm, mine):
    run = submitted(tmp_path / "runs")
    with_attempt(run, slurm.add(submit.job_name(str(run.path)), "RUNNING"))
    if not mine:
        os.chown(run.path, SOMEBODY, SOMEBODY)
    call = recipes("top-up", "--runs", tmp_path / "runs")
    call.communicate(timeout=60)
    assert call.returncode == 0
    assert len(slurm.calls("sbatch")) == (2 if mine else 0)


def odd_runs(runs: Path) -> dict[str, str]:
    """Run folders that cannot be read, each with a word of why."""
    words = {}
    for name, why in (
        ("torn", "run.json"),
        ("empty", "run.json is empty"),
        ("missing", "run.json is missing"),
        ("folder", "run.json"),
        ("steps", "max_steps"),
        ("file", "attempts"),
    ):
        run = submitted(runs, name)
        facts = run.path / "run.json"
        words[run.path.name] = why
        if name == "torn":
            facts.write_text(facts.read_text()[:40])
        elif name == "empty":
            facts.write_text("")
        elif name in ("missing", "folder"):
            facts.unlink()
            if name == "folder":
                facts.mkdir()
        elif name == "steps":
            write_json(facts, {**run.facts, "max_steps": "many"})
        else:
            (run.path / "attempts").rmdir()
            (run.path / "attempts").write_text("")
    return words


def test_unreadable_run_is_a_row_with_reason(tmp_path, slurm, recipes_cli):
    good = submitted(tmp_path / "runs")
    with_attempt(good, slurm.add(submit.job_name(str(good.path)), "RUNNING"))
    words = odd_runs(tmp_path / "runs")
    done = recipes_cli("status", "--runs", tmp_path / "runs", "--json")
    assert done.returncode == 0, done.stderr
    rows = {Path(row["run"]).name: row for row in json.loads(done.stdout)}
    assert rows[good.path.name]["state"] == "running"
    for name, why in words.items():
        assert rows[name]["state"] == "unreadable", rows[name]
        assert why in rows[name]["message"]
    table = recipes_cli("status", "--runs", tmp_path / "runs", "--exit-code")
    assert table.returncode == 1
    assert len(re.findall(r"^\S+ +unreadable\b", table.stdout, re.MULTILINE)) == len(words)
    assert "Traceback" not in table.stdout + table.stderr


def test_invalid_results_and_metrics_do_not_fail_listings(tmp_path, slurm, recipes_cli):
    for i, odd in enumerate(({"state": 7, "started": "x"}, {"nodes": 3, "before": "y", "job": []}, {"ended": {}})):
        run = submitted(tmp_path / "runs", f"odd{i}")
        write_json(with_attempt(run, "1").path / "result.json", odd)
        (run.path / "metrics.jsonl").mkdir()
        (run.path / "plan.json").write_text('{"layouts": [{"mfu": "x"}]}')
        history = recipes_cli("history", run.path)
        assert history.returncode == 0, history.stderr
    done = recipes_cli("status", "--runs", tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("odd") >= 3


def test_slurm_is_queried_once_for_all_runs(tmp_path, slurm):
    runs = [submitted(tmp_path / "runs", f"r{i}") for i in range(5)]
    for i, run in enumerate(runs[:4]):
        with_attempt(run, slurm.add(submit.job_name(str(run.path)), "FAILED", job=str(500 + i)), "failed")
    views = run_views.summarize_runs(runs, connection.Connection())
    assert [view.state for view in views] == ["failed"] * 5
    assert len(slurm.calls("squeue")) == 1
    assert len(slurm.calls("sacct")) + len(slurm.calls("scontrol")) == 0
    for run in runs[:4]:
        write_json(run.attempts[0].path / "result.json", {**run.attempts[0].result, "job": "9"})
    run_views.summarize_runs(runs, connection.Connection())
    assert slurm.calls("sacct") == ["-X -nP -j 9 -o JobIDRaw,State"], "what the controller has forgotten, in one go"
    for run in runs:
        write_json(run.path / "done", {"step": 100})
    run_views.summarize_runs(runs, connection.Connection())
    assert (len(slurm.calls("squeue")), len(slurm.calls("sacct"))) == (3, 1)


def test_jobs_of_a_stopped_run_are_listed(tmp_path, slurm):
    run = submitted(tmp_path / "runs")
    with_attempt(run, slurm.add(submit.job_name(str(run.path)), "RUNNING"))
    guard.stop(run, "cancelled by the user", by=run_state.StoppedBy.USER)
    assert [job.state for job in seen(run).jobs or []] == ["RUNNING"], "so that --resume does not queue beside them"


@pytest.mark.slow
def test_following_logs_queries_slurm_once(tmp_path, slurm):
    run = submitted(tmp_path / "runs")
    attempt = with_attempt(run, slurm.add(submit.job_name(str(run.path)), "RUNNING"))
    follow = recipes("logs", "-f", run.path)
    time.sleep(5)
    with (attempt.path / "logs" / "0.0.log").open("a") as log:
        log.write("another line\n")
    write_json(run.path / "done", {"step": 100})
    attempt.finish("done")
    output = follow.communicate(timeout=60)[0]
    assert [line.rpartition("] ")[2] for line in output.splitlines()] == ["a line", "another line"]
    assert len(slurm.calls("squeue")) == 1


def test_logs_of_ended_attempts_are_read_once(tmp_path):
    run = submitted(tmp_path / "runs")
    for name in ("1", "2"):
        with_attempt(run, name, "failed" if name == "1" else "running")
    reader = LogReader(run)
    assert len(list(reader.read_new())) == 2
    assert reader.files == 2
    assert list(reader.read_new()) == []
    assert reader.files == 1


def test_message_names_only_existing_job_output(tmp_path, slurm):
    run = submitted(tmp_path / "runs")
    assert "slurm-" not in seen(run).message
    (run.path / "slurm-100.out").write_text("attempt.py needs Python 3.9\n\n")
    assert "slurm-100.out: attempt.py needs Python 3.9" in seen(run).message


def test_logs_show_output_of_a_job_without_attempt(tmp_path, slurm, recipes_cli):
    run = submitted(tmp_path / "runs")
    nothing = recipes_cli("logs", run.path)
    assert nothing.returncode == 1
    assert "has no output of these ranks yet" in nothing.stderr
    (run.path / "slurm-100.out").write_text("attempt.py needs Python 3.9\n")
    done = recipes_cli("logs", run.path)
    assert (done.returncode, done.stdout) == (0, "[slurm-100] attempt.py needs Python 3.9\n")


def test_truncated_result_has_no_time(tmp_path, slurm, recipes_cli):
    run = submitted(tmp_path / "runs")
    attempt = with_attempt(run, "1", "failed")
    (attempt.path / "result.json").write_text('{"state": "fai')
    history = recipes_cli("history", run.path).stdout
    assert " d " not in history
    assert "result.json is missing or" in history
    assert "result.json cannot be read" in seen(run).message
    row = json.loads(recipes_cli("history", run.path, "--json").stdout)[0]
    assert (row["state"], row["began"], row["took_s"]) == ("unreadable", None, None)


def test_steps_lost_with_a_damaged_checkpoint_are_shown(tmp_path, slurm, recipes_cli):
    run = submitted(tmp_path / "runs")
    with_attempt(run, slurm.add(submit.job_name(str(run.path)), "FAILED"), "failed")
    attempt = with_attempt(run, slurm.add(submit.job_name(str(run.path)), "RUNNING"))
    append_line(run.path / "metrics.jsonl", {"step": 33, "loss": 2.0, "attempt": "001"})
    words = "resumes from step 20 (step=19, verified); step=29-last is corrupt and was moved to damaged/: torn"
    decided = {"step": 20, "lost_steps": 10, "set_aside": [{"checkpoint": "step=29-last"}], "words": words}
    write_json(attempt.path / "result.json", {**attempt.result, "resume": decided})
    view = seen(run)
    assert (view.step, view.resumed) == (20, (words,)), "no step of this attempt is written yet"
    assert words in recipes_cli("status", run.path).stdout
    history = json.loads(recipes_cli("history", run.path, "--json").stdout)
    assert [row["resumed_step"] for row in history] == [None, 20]
    assert [row["notes"] for row in history] == [[], [words]]
    append_line(run.path / "metrics.jsonl", {"step": 21, "loss": 2.0, "attempt": "002"})
    assert seen(run).step == 21, "the last one written, not the largest"


def test_new_copy_lacks_removed_markers(tmp_path):
    """The shell commands of the real thing, without SSH."""
    run = submitted(tmp_path / "runs")
    guard.stop(run, "cancelled by the user", by=run_state.StoppedBy.USER)
    first = mirror.fetch(connection.Connection(), f"{tmp_path}/runs")
    copy = first.path / run.path.relative_to(tmp_path / "runs")
    assert (copy / run_state.STOP).exists()
    assert first.users == {copy: owner.user_name(os.geteuid())}
    assert first.remote_path(copy) == str(run.path)
    (run.path / run_state.STOP).unlink()
    later = mirror.fetch(connection.Connection(), f"{tmp_path}/runs")
    assert not (later.path / run.path.relative_to(tmp_path / "runs") / run_state.STOP).exists()


@needs_root
def test_status_shows_own_runs_and_with_all_everybodys(tmp_path, slurm, recipes_cli):
    mine, other = submitted(tmp_path / "runs"), submitted(tmp_path / "runs")
    os.chown(other.path, SOMEBODY, SOMEBODY)
    done = recipes_cli("status", "--runs", tmp_path / "runs")
    assert mine.path.name in done.stdout
    assert other.path.name not in done.stdout
    assert "1 run of other users" in done.stderr
    everybody = recipes_cli("status", "--runs", tmp_path / "runs", "--all")
    assert {mine.path.name, other.path.name} <= {*everybody.stdout.replace("/", " ").split()}
    assert str(SOMEBODY) in everybody.stdout


def test_other_files_in_a_folder_are_not_runs(tmp_path):
    run = submitted(tmp_path / "runs")
    (tmp_path / "runs" / "notes.txt").write_text("")
    (tmp_path / "runs" / NAME / "drafts").mkdir()
    (tmp_path / "runs" / ".jobs" / "12" / "code").mkdir(parents=True)
    assert [listed.run for listed in run_list.list_runs(tmp_path / "runs")] == [run]
