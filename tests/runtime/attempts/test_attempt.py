"""The parts of an attempt that need no Slurm: circles, stalls, drift, deadlines, names, versions."""

import subprocess
import sys
import time

import pytest

from superpod.common.json_files import append_line
from superpod.diagnosis import drift
from superpod.runtime.attempts import guard
from superpod.runtime.heartbeat import stall
from superpod.runtime.rank import rank
from superpod.runtime.rank.stopping import Deadline
from tests.reports.runs import checkpoint_files as made

NOW = 1_000_000.0


def checkpoint(run, step, *, whole=True, marked=False):
    folder = made.write(run.checkpoints / f"step={step - 1}-consumed_samples={step}.0-last")
    if not whole:
        (folder / "weights" / "metadata.json").unlink()
    if marked:
        (run.checkpoints / f"{folder.name}-unfinished").touch()


def ended(run, before, state="failed", message="it broke"):
    attempt = run.new_attempt(job="1")
    attempt.mark("running", before=before)
    attempt.finish(state, message=message)
    return attempt


def beat(attempt, number, ago, step=5, phase="train", moved=None):
    line = {"t": NOW - ago, "step": step, "phase": phase, "host": f"n{number}"}
    append_line(attempt.path / "heartbeat" / f"{number}.jsonl", line | ({"moved": NOW - moved} if moved else {}))


# -- guard ----------------------------------------------------------------------------------------------------------


def test_the_newest_whole_checkpoint_counts(run):
    assert guard.newest_step(run) == 0
    checkpoint(run, 10)
    checkpoint(run, 20, whole=False)
    checkpoint(run, 30, marked=True)
    assert guard.newest_step(run) == 10


def test_two_attempts_without_a_checkpoint_stop_the_run_with_the_last_words(run):
    ended(run, 0)
    assert guard.reason_to_stop(run, 2, 20) is None
    ended(run, 0, message="ValueError: wrong")
    reason = guard.reason_to_stop(run, 2, 20)
    assert reason == "2 consecutive attempts wrote no new checkpoint; the last one: ValueError: wrong"


def test_a_checkpoint_in_between_is_progress(run):
    ended(run, 0)
    checkpoint(run, 10)
    ended(run, 10)
    assert guard.reason_to_stop(run, 2, 20) is None


def test_failures_are_bounded_even_with_progress(run):
    for number in range(3):
        ended(run, 10 * number)
        checkpoint(run, 10 * (number + 1))
    assert guard.reason_to_stop(run, 2, 3) is None
    assert str(guard.reason_to_stop(run, 2, 2)).startswith("3 attempts failed, but only 2 are allowed")


def test_an_attempt_that_died_without_a_word_is_closed(run):
    run.new_attempt(job="7").mark("running", before=0)
    guard.reason_to_stop(run, 2, 20)
    assert run.attempts[0].result["state"] == "failed"
    assert "killed with its job or its node" in run.attempts[0].result["message"]


def test_a_stalled_attempt_keeps_its_word(run):
    ended(run, 0, "stalled", "rank 2 on node2 no longer answers")
    guard.reason_to_stop(run, 2, 20)
    assert run.attempts[0].result["state"] == "stalled"


def test_nothing_to_do(run):
    assert guard.reason_to_skip(run, lambda job: "", "2") is None
    ended(run, 0, "requeued")
    assert guard.reason_to_skip(run, lambda job: "TIMEOUT", "2") is None
    assert guard.reason_to_skip(run, lambda job: "CANCELLED", "1") is None, "the same job, requeued"
    assert "was cancelled by the user" in str(guard.reason_to_skip(run, lambda job: "CANCELLED", "2"))
    assert "is stopped" in str(guard.reason_to_skip(run, lambda job: "", "3"))
    (run.path / "done").write_text("{}")
    assert str(guard.reason_to_skip(run, lambda job: "", "3")).endswith("is done")


def test_the_longest_save_sets_the_warning(run):
    assert guard.save_seconds(run, 300) == 300
    attempt = run.new_attempt()
    append_line(attempt.path / "heartbeat" / "0.jsonl", {"t": 1, "save_s": 400})
    append_line(attempt.path / "heartbeat" / "0.jsonl", {"t": 2, "save_s": "x"})
    assert guard.save_seconds(run, 300) == 800


# -- stall ----------------------------------------------------------------------------------------------------------


def silent(attempt, began_ago=1000.0):
    return stall.silent_rank(attempt.heartbeats(), stall.nodes_of(attempt), 30, began_ago, NOW)


def test_all_is_well(run):
    attempt = run.new_attempt()
    assert silent(attempt, began_ago=10) is None
    for number in range(4):
        beat(attempt, number, ago=1)
    assert silent(attempt) is None


def test_nobody_has_begun(run):
    assert "no rank has started" in str(silent(run.new_attempt(), began_ago=400))


def test_the_rank_that_no_longer_answers_is_named(run):
    attempt = run.new_attempt()
    for number in range(4):
        beat(attempt, number, ago=1 if number != 2 else 40, moved=45)
    assert silent(attempt) == "rank 2 on n2 no longer answers since step 5 (train), 40 s ago, before the others"


def test_the_rank_that_did_not_come_to_the_step_is_named(run):
    attempt = run.new_attempt()
    for number in range(4):
        beat(attempt, number, ago=1, step=6 if number != 1 else 5, moved=50)
    assert str(silent(attempt)).startswith("rank 1 on n1 is stuck in train since step 5")


@pytest.mark.parametrize("phase", ["save", "validate", "start"])
def test_a_save_may_take_longer_than_a_step(run, phase):
    attempt = run.new_attempt()
    for number in range(2):
        beat(attempt, number, ago=1, phase=phase, moved=100)
    assert silent(attempt) is None


@pytest.mark.parametrize(("phase", "is_named"), [("save", True), ("validate", True), ("start", False)])
def test_a_process_that_is_gone_in_a_save_is_not_waited_for_ten_times_as_long(run, phase, is_named):
    """All ranks were saving when one was stopped, and that was seen after 300 s, not 30."""
    attempt = run.new_attempt()
    for number in range(4):
        beat(attempt, number, ago=1 if number != 2 else 40, moved=45, phase=phase)
    words = f"rank 2 on n2 no longer answers since step 5 ({phase}), 40 s ago, before the others"
    assert silent(attempt, began_ago=100.0) == (words if is_named else None)


def test_ranks_that_have_ended_are_no_stall(run):
    attempt = run.new_attempt()
    for number in range(2):
        beat(attempt, number, ago=500, phase="stopped")
    assert silent(attempt) is None


# -- drift ----------------------------------------------------------------------------------------------------------


def lines(*seconds, attempt="001"):
    return [{"step": i + 1, "attempt": attempt, "step_time_s": s} for i, s in enumerate(seconds)]


def test_steps_that_become_slower_are_an_alarm():
    assert drift.alarm(lines(9, *[1.0] * 30)) == ""
    assert drift.alarm(lines(9, *[1.0] * 8, *[1.2] * 10)) == ""
    alarm = drift.alarm(lines(9, *[1.0] * 12, *[4.0] * 12))
    assert alarm == "a step takes 4 s, 300% more than at the start (1 s), since about step 14 (attempt 001)"


def test_one_slow_step_and_a_new_attempt_are_no_alarm():
    assert drift.alarm(lines(9, *[1.0] * 10, 50, *[1.0] * 10)) == ""
    assert drift.alarm([*lines(9, *[1.0] * 12), *lines(90, *[1.0] * 12, attempt="002")]) == ""
    assert drift.alarm([]) == ""


# -- ranks ----------------------------------------------------------------------------------------------------------


def test_the_deadline_leaves_time_for_a_save_and_a_step():
    at = time.time()
    assert not Deadline(0, 10).is_near(1)
    assert not Deadline(at + 100, 10).is_near(1)
    assert Deadline(at + 11, 10).is_near(1)
    slow = Deadline(at + 100, 10)
    slow.record_save(60)
    assert slow.is_near(1)
    assert not Deadline.from_environ({}).is_near(1)
    assert Deadline.from_environ({"SUPERPOD_DEADLINE": str(at), "SUPERPOD_SAVE_S": "5"}).is_near(1)


def test_a_rank_gets_pytorchs_names_from_slurms():
    slurm = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2", "SLURM_NTASKS": "8", "SLURM_NNODES": "4"}
    names = rank.torch_variables(slurm | {"SLURM_JOB_ID": "77"})
    wanted = {"RANK": "5", "LOCAL_RANK": "1", "GROUP_RANK": "2", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"}
    assert {key: names[key] for key in wanted} == wanted


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        ({"nemo_toolkit": "2.7.3", "megatron-core": "0.15.3"}, ""),
        ({"nemo_toolkit": "2.7.3", "megatron-core": "0.16.1"}, "nemo_toolkit 2.7.3 with megatron-core 0.16.1"),
        ({}, ""),
    ],
)
def test_known_bad_pairs_are_refused(versions, says):
    from superpod.runtime.runs.versions import bad_pair

    assert bad_pair(versions).startswith(says)
    assert bool(bad_pair(versions)) == bool(says)


def test_a_child_does_not_die_of_slurms_signals(tmp_path):
    """Slurm signals every process of a job: data workers and checkpoint writers must outlive it."""
    script = """
import multiprocessing as mp, os, signal, sys, time
from superpod.runtime.rank import rank
from superpod.runtime.runs.versions import bad_pair
def child(): time.sleep(1.5)
if __name__ == "__main__":
    rank.shield_children()
    signal.signal(signal.SIGTERM, lambda *_: None)
    ended = {}
    for kind in ("fork", "spawn"):
        worker = mp.get_context(kind).Process(target=child)
        worker.start()
        time.sleep(0.7)
        for number in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(worker.pid, number)
        worker.join(20)
        ended[kind] = worker.exitcode
    print(ended)
"""
    file = tmp_path / "shielded.py"
    file.write_text(script)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "{'fork': 0, 'spawn': 0}", done.stderr
