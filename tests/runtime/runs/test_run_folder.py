import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from superpod.common import locks
from superpod.common.json_files import append_line, write_json
from superpod.errors import UserError
from superpod.runtime.runs import run_folder
from superpod.runtime.runs.run_folder import Attempt, RunFolder
from superpod.runtime.runs.run_state import DONE, UNRECORDED, Cause, State, Status
from tests.conftest import NAME, fill


def child(code: str) -> subprocess.Popen:
    """A Python process that says a line when it is ready, and then sleeps."""
    code += "\nprint('ready', flush=True)\nimport time; time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


@contextlib.contextmanager
def running(code: str):
    process = child(code)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def hold(run: RunFolder) -> str:
    return f"""
from superpod.runtime.runs.run_folder import RunFolder
run = RunFolder.open({str(run.path)!r}); held = run.lock(); held.__enter__(); run.new_attempt()"""


def test_the_tree_of_a_run_is_the_contract(run):
    attempt = run.new_attempt()
    attempt.write_env({"PATH": "/bin", "HF_TOKEN": "hf_abcdefghijk"})
    run.write_plan({"layouts": []})
    append_line(run.path / "metrics.jsonl", {"step": 1})
    written = {str(p.relative_to(run.path)) for p in run.path.rglob("*") if not p.name.startswith(".")}
    assert written == {
        "run.json", "recipe.txt", "plan.json", "metrics.jsonl", "checkpoints", "attempts", "attempts/001",
        "attempts/001/env.json", "attempts/001/result.json", "attempts/001/logs", "attempts/001/heartbeat",
    }  # fmt: skip
    assert run.path.parent.name == NAME
    assert (run.path / "recipe.txt").read_text() == "a = 1\nb = 2\n"
    assert run.facts["seed"] == 7


def test_env_has_versions_and_no_secret(run):
    attempt = run.new_attempt()
    attempt.write_env({"SLURM_JOB_ID": "12", "HF_TOKEN": "hf_abcdefghijk", "OTHER": "x"})
    env = json.loads((attempt.path / "env.json").read_text())
    assert env["environment"] == {"SLURM_JOB_ID": "12", "HF_TOKEN": "<redacted>"}
    assert env["versions"]["python"] == sys.version.split()[0]
    assert env["cores"] >= 1


def test_concurrent_creates_never_share_a_folder(tmp_path):
    made = []
    threads = [
        threading.Thread(target=lambda: made.append(RunFolder.create(tmp_path, NAME, facts={}, recipe_lines=[])))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({run.path for run in made}) == 16


def test_a_folder_name_that_is_taken_is_passed_over(tmp_path, monkeypatch):
    tokens = iter(["aaaaaa", "aaaaaa", "bbbbbb"])
    monkeypatch.setattr(run_folder.secrets, "token_hex", lambda n: next(tokens))
    monkeypatch.setattr(run_folder, "datetime", type("Frozen", (), {"now": staticmethod(lambda tz: rundir_time)}))
    first, second = (RunFolder.create(tmp_path, NAME, facts={}, recipe_lines=[]) for _ in range(2))
    assert [first.path.name, second.path.name] == ["20260102T030405Z-aaaaaa", "20260102T030405Z-bbbbbb"]


rundir_time = __import__("datetime").datetime(2026, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b", "a\nb"])
def test_create_refuses_names_that_are_no_folder_names(tmp_path, name):
    with pytest.raises(UserError, match="is not a valid folder name"):
        RunFolder.create(tmp_path, name, facts={}, recipe_lines=[])
    assert not list(tmp_path.iterdir())


def test_create_says_that_a_file_is_in_the_way(tmp_path):
    (tmp_path / NAME).write_text("mine")
    with pytest.raises(UserError, match=f"{NAME} must be a folder, but a file exists there"):
        RunFolder.create(tmp_path, NAME, facts={}, recipe_lines=[])


def test_create_says_that_the_folder_cannot_be_written(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(UserError, match=r"cannot write .*: Read-only file system") as caught:
        RunFolder.create(small_disk, NAME, facts={}, recipe_lines=[])
    assert caught.value.hint


def test_create_on_a_full_disk_leaves_nothing_behind(small_disk):
    (small_disk / NAME).mkdir()
    fill(small_disk)
    with pytest.raises(UserError, match="no space left"):
        RunFolder.create(small_disk, NAME, facts={}, recipe_lines=["x" * 10_000])
    assert not list((small_disk / NAME).iterdir())


def test_an_attempt_that_is_interrupted_while_its_files_are_written_is_not_left_behind(run, monkeypatch):
    def interrupted(handle):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.new_attempt()
    assert list((run.path / "attempts").iterdir()) == []
    with pytest.raises(KeyboardInterrupt):
        run.write_plan({})
    assert not [path.name for path in run.path.iterdir() if path.name.startswith(".plan")]


def test_new_attempt_on_a_full_disk_is_an_error_of_the_user(small_disk):
    run = RunFolder.create(small_disk, NAME, facts={}, recipe_lines=[])
    fill(small_disk)
    with pytest.raises(UserError, match="no space left"):
        run.new_attempt()


@pytest.mark.parametrize("thief", [False, True], ids=["reserve", "reserve taken by another"])
def test_finish_writes_its_result_on_a_full_disk(small_disk, monkeypatch, thief):
    run = RunFolder.create(small_disk, NAME, facts={}, recipe_lines=[])
    attempt = run.new_attempt()
    fill(small_disk)
    with pytest.raises(OSError, match="No space left"):
        write_json(run.path / "run.json", {"x": "y" * 5000})
    if thief:
        (attempt.path / ".reserve").unlink()
        fill(small_disk, "thief")
    before = (attempt.path / "result.json").stat().st_ino
    attempt.finish("failed", exit_code=1, message="no space left on device", last_step=41)
    renamed = (attempt.path / "result.json").stat().st_ino != before
    assert renamed is not thief  # the reserve is there for the atomic way; in place is the last resort
    result = json.loads((attempt.path / "result.json").read_text())
    assert (result["state"], result["exit_code"], result["last_step"]) == ("failed", 1, 41)
    assert run.status().message == "no space left on device"
    assert not list(attempt.path.glob(".result*"))


def test_attempts_count_up(run):
    assert [run.new_attempt().name for _ in range(3)] == ["001", "002", "003"]
    for name in ("099", "1000", "notes"):
        (run.path / "attempts" / name).mkdir()
    assert run.new_attempt().name == "1001"
    assert [attempt.name for attempt in run.attempts][-2:] == ["1000", "1001"]


def test_latest_is_the_newest(tmp_path):
    assert RunFolder.latest(tmp_path, NAME) is None
    runs = [RunFolder.create(tmp_path, NAME, facts={}, recipe_lines=[]) for _ in range(5)]
    RunFolder.create(tmp_path, "other_pretrain_h100_bf16", facts={}, recipe_lines=[])
    (tmp_path / NAME / "99991231T000000Z-zzzzzz").mkdir()  # no run.json: no run
    assert RunFolder.latest(tmp_path, NAME) == runs[-1]


def test_open_refuses_what_is_no_run(tmp_path, run):
    assert RunFolder.open(str(run.path)) == run
    with pytest.raises(UserError, match="not a run folder"):
        RunFolder.open(tmp_path)


def test_the_lock_is_held_once_and_its_holder_is_named(run):
    with running(hold(run)) as process:
        with pytest.raises(UserError, match=rf"in use by pid {process.pid} on host "), run.lock():
            pass
        assert run.state() == "running"
    with run.lock():
        assert run.state() == "running"


def test_after_kill_9_of_everything_the_run_has_failed_and_is_free(run):
    with running(hold(run)) as process:
        os.kill(process.pid, signal.SIGKILL)
    assert run.status() == Status(State.FAILED, UNRECORDED, "001", cause=Cause.UNRECORDED)
    with run.lock():
        assert run.new_attempt().name == "002"


def test_ranks_that_outlive_their_launcher_keep_the_run(run):
    run.new_attempt()
    with running(f"from superpod.common.locks import acquire_shared; h = acquire_shared({str(run.path / '.ranks')!r})"):
        assert run.state() == "running"
        with pytest.raises(UserError, match=r"ranks of attempt 001 .* are still running"), run.lock():
            pass
    assert run.state() == "failed"
    with run.lock():
        assert run.state() == "running"


def test_looking_at_the_state_never_takes_the_lock_from_anyone(run):
    run.new_attempt()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            run.state()

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for _ in range(50):
            with run.lock():
                pass
    finally:
        stop.set()
        watcher.join()


@pytest.mark.parametrize("state", ["failed", "cancelled", "stalled", "requeued"])
def test_state_is_what_the_last_attempt_said(run, state):
    assert run.state() == "queued"
    run.new_attempt().finish("failed", exit_code=1, message="first")
    assert run.new_attempt().finish(state, exit_code=3, message="second") == state
    assert run.status() == Status(state, "second", "002", 3)


def test_done_needs_the_marker_and_nothing_else(run):
    attempt = run.new_attempt()
    assert attempt.finish("done", exit_code=0) == "failed"
    assert not run.done
    assert run.status().state == "failed"
    assert "before its last step" in run.status().message
    (run.path / DONE).write_text("{}")
    assert run.state() == "done"
    assert attempt.finish("done", exit_code=0) == "done"


def test_a_done_run_goes_on_with_more_steps_only(run):
    (run.path / DONE).write_text('{"step": 20}')
    with pytest.raises(UserError, match="is done at step 20"):
        run.reopen(max_steps=20)
    assert run.done
    marker = run.reopen(max_steps=40)
    assert not run.done
    run.restore_done(marker)
    assert run.done
    assert json.loads((run.path / DONE).read_text()) == {"step": 20}


def test_what_a_attempt_ran_with_is_kept_beside_what_was_known(run):
    run.update({"overrides": ["trainer.max_steps=40"]}, ["a = 3"])
    assert run.facts["overrides"] == ["trainer.max_steps=40"]
    assert (run.facts["seed"], run.facts["recipe"]) == (7, NAME)
    assert (run.path / "recipe.txt").read_text() == "a = 3\n"


def test_a_file_system_without_locks_is_named(run, monkeypatch):
    def unsupported(handle: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(locks.fcntl, "flock", unsupported)
    with pytest.raises(UserError, match="does not support file locks"), run.lock():
        pass
    run.new_attempt()
    assert run.state() == "failed"


def test_unknown_states_are_our_bug(run):
    attempt = run.new_attempt()
    for call in (attempt.finish, attempt.mark):
        with pytest.raises(ValueError, match="state"):
            call("finished")
    with pytest.raises(ValueError, match="state"):
        attempt.mark("done")


def test_an_attempt_of_slurm_needs_no_lock(run):
    attempt = run.new_attempt(state="queued", job="123")
    assert run.state() == "queued"
    attempt.mark("running", node="n1")
    assert run.state() == "running"
    assert attempt.result["job"] == "123"
    assert attempt.result["node"] == "n1"


def test_saving_is_told_by_the_heartbeat(run):
    attempt, now = run.new_attempt(job="1"), time.time()
    append_line(attempt.path / "heartbeat" / "0.jsonl", {"t": now, "step": 3, "phase": "save"})
    assert run.state() == "saving"
    append_line(attempt.path / "heartbeat" / "0.jsonl", {"t": now, "step": 4, "phase": "train"})
    append_line(attempt.path / "heartbeat" / "10.jsonl", {"t": now, "step": 2, "phase": "train"})
    assert run.state() == "running"
    assert {rank: beat["step"] for rank, beat in attempt.heartbeats().items()} == {0: 4, 10: 2}


@pytest.mark.parametrize("text", ["", "{", "[]", "\0" * 50])
def test_a_torn_result_is_a_failed_attempt(run, text):
    attempt = run.new_attempt()
    (attempt.path / "result.json").write_text(text)
    assert run.status() == Status(State.FAILED, "attempts/001/result.json cannot be read", "001")
    attempt.finish("failed", exit_code=1)
    assert attempt.result["state"] == "failed"


def test_logs_are_ordered_by_node_and_rank(tmp_path):
    (tmp_path / "logs").mkdir()
    for name in ("0.10.log", "0.2.log", "10.80.log", "2.16.log"):
        (tmp_path / "logs" / name).touch()
    assert [p.name for p in Attempt(tmp_path).logs] == ["0.2.log", "0.10.log", "2.16.log", "10.80.log"]


def test_metrics_last_line_of_a_step_wins_and_torn_lines_are_left_out(run):
    assert run.metrics() == []
    path = run.path / "metrics.jsonl"
    for record in (
        {"step": 1, "loss": 5.0},
        {"step": 2, "loss": 4.0},
        {"step": 3, "loss": 3.0},
        {"step": 2, "loss": 4.5},
    ):
        append_line(path, record)
    with open(path, "a") as file:
        file.write('{"step": 4, "lo')
    assert [(line["step"], line["loss"]) for line in run.metrics()] == [(1, 5.0), (2, 4.5), (3, 3.0)]
    append_line(path, {"step": 4, "loss": 2.0})
    assert run.metrics()[-1] == {"step": 4, "loss": 2.0}


@pytest.mark.parametrize(
    "line",
    [
        '{"step": "4"}', '{"step": 4.5}', '{"step": true}', '{"step": null}', '{"step": [4]}', '{"step": -1}', "{}",
        '{"step": 4, "loss": "low"}', '{"step": 4, "step_time_s": -1.0}', '{"step": 4, "val_loss": [1]}',
        '{"step": 4, "t": "x"}',
        '{"step": 4, "tokens": {}}', '{"step": 4, "attempt": 2}',
        '{"step": 4, "attempt": null}',
        '{"step": 4, "step_time_s": "1"}', '{"step": 4, "allocated_gib": "1"}', "[" * 100_000, '"step"', "\xff\0",
    ],
)  # fmt: skip
def test_a_corrupted_line_is_left_out(run, line):
    good = {"step": 1, "loss": 5, "val_loss": None, "attempt": "001"}
    append_line(run.path / "metrics.jsonl", good)
    with open(run.path / "metrics.jsonl", "a", encoding="latin-1") as file:
        file.write(f"{line}\n")
    assert run.metrics() == [good]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "null"])
@pytest.mark.parametrize("key", ["loss", "tokens", "grad_norm"])
def test_a_number_that_is_none_is_null_and_its_line_stays(run, key, value):
    (run.path / "metrics.jsonl").write_text(f'{{"step": 4, "{key}": {value}}}\n')
    assert run.metrics() == run.newest_metrics() == [{"step": 4, key: None}]


def test_folders_in_the_place_of_files_hold_no_lines(run):
    attempt = run.new_attempt()
    for path in (
        run.path / "metrics.jsonl",
        attempt.path / "heartbeat" / "0.jsonl",
        attempt.path / "heartbeat" / "².jsonl",
    ):
        path.mkdir()
    for name in ("²", "x", "-1"):
        (run.path / "attempts" / name).mkdir()
    (run.path / "attempts" / "002").touch()
    assert run.metrics() == []
    assert [attempt.name for attempt in run.attempts] == ["001", "002"]
    assert attempt.heartbeats() == {0: {}}
    assert run.attempts[-1].heartbeat() == {}
    assert run.state() == "failed"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("overrides", "a=1", "a list of strings"), ("overrides", {}, "a list of strings"),
        ("overrides", None, "a list of strings"), ("overrides", ["a=1", 2], "a list of strings"),
        ("data", 3, "a string or null"), ("num_nodes", [1], "a positive"), ("num_nodes", True, "a positive"),
        ("num_nodes", 0, "a positive"), ("checkpoint_bytes", "9", "a non-negative"), ("t", "now", "a number"),
        ("t", None, "a number"), ("recipe", ["x"], "a string"), ("unigram_entropy_nats", "6", "a number or null"),
    ],
)  # fmt: skip
def test_open_names_what_is_wrong_in_run_json_and_latest_passes_over_it(run, key, value, words):
    runs = run.path.parents[1]
    broken = RunFolder.create(runs, NAME, facts={}, recipe_lines=[])
    (broken.path / "run.json").write_text(json.dumps(broken.facts | {key: value}))
    with pytest.raises(UserError, match=rf"run\.json: {key} must be {words}") as caught:
        RunFolder.open(broken.path)
    assert caught.value.hint
    assert RunFolder.latest(runs, NAME) == run


def test_open_takes_the_facts_of_a_run(tmp_path):
    facts = {"overrides": ["a=1"], "data": None, "num_nodes": 2, "checkpoint_bytes": 0, "unigram_entropy_nats": 6.5}
    run = RunFolder.create(tmp_path, NAME, facts=facts, recipe_lines=[])
    assert RunFolder.open(run.path) == run == RunFolder.latest(tmp_path, NAME)


def test_the_import_of_a_run_folder_needs_no_torch():
    code = (
        "import sys; import superpod.runtime.runs.run_folder; print('torch' in sys.modules, 'lightning' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
