"""What a failed job is said to have died of."""

import pytest

from superpod.runtime.attempts import diagnose, guard
from superpod.runtime.attempts.diagnose import summarize
from superpod.runtime.runs.run_folder import RunFolder


@pytest.fixture
def attempt(tmp_path):
    return RunFolder.create(tmp_path, "tiny", facts={}, recipe_lines=[]).new_attempt()


def diagnosis(attempt, rank="", torchrun=""):
    (attempt.path / "logs" / "0.0.log").write_text(rank)
    folder = attempt.path / "nemo_run" / "x"
    folder.mkdir(parents=True)
    (folder / "stderr.log").write_text(torchrun)
    return summarize(RunFolder(attempt.path.parents[1]), attempt)


@pytest.mark.parametrize(
    ("rank", "torchrun", "expected"),
    [
        ("  File x\nValueError: heads 3 by tp 2\n", "", "ValueError: heads 3 by tp 2 (attempts/001/logs/0.0.log)"),
        ("", "[default0]:binascii.Error: Invalid string\n=====\n", "Error: Invalid string"),
        ("[rank1]: RuntimeError: Connection closed by peer [::1]\nTypeError: the cause\n", "", "TypeError: the cause"),
        ("TypeError: the cause\nRuntimeError: Connection reset by peer\n", "", "TypeError: the cause"),
        ("", "exitcode  : -9 (pid: 77)\n", "a rank was killed (pid 77, signal 9"),
        ("", "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 77)\n", "rank 1 was killed (pid 77, signal 9"),
        ("", "╭─ Error ─╮\n│ No such option: -n │\n╰─────╯\n======\n", "No such option: -n"),
        ("OSError: [Errno 28] No space left on device\n", "", "[disk_full]"),
        ("KeyError: 'optimizer.distributed.x from model not in state dict: [..]'\n", "", "[checkpoint_other_layout]"),
        ("", "", "ended without an error message"),
    ],
)
def test_the_cause_is_named(rank, torchrun, expected, attempt):
    diagnosed = diagnosis(attempt, rank, torchrun)
    assert expected in diagnosed.cause
    assert diagnosed.known == (expected != "ended without an error message")


def test_a_long_error_is_cut(attempt):
    assert len(diagnosis(attempt, f"ValueError: {'x' * 5000}\n").cause) < 500


def test_words_of_ours_in_an_error_are_a_known_cause(attempt):
    """srun's last line stands in only where no log names a cause."""
    run = RunFolder(attempt.path.parents[1])
    (attempt.path / "logs" / "srun.log").write_text("srun: error: no such luck\n")
    assert guard.failure_message(run, attempt, 1) == "srun: error: no such luck (attempts/001/logs/srun.log)"
    (attempt.path / "logs" / "0.0.log").write_text("RuntimeError: the worker ended without saying why\n")
    assert guard.failure_message(run, attempt, 1).startswith("RuntimeError: the worker ended without saying why")


FORCED = "srun: Force Terminated StepId=160.0\n"
STEP = "slurmstepd-node1: error: *** STEP 7.0 ON node1 CANCELLED AT 2026-11-22T20:28:16 DUE TO NODE FAILURE ***\n"


@pytest.mark.parametrize(
    ("srun", "rank", "expected"),
    [
        (
            "srun: error: node2: task 3: Killed\nsrun: error: node1: task 0: Terminated\n" + FORCED,
            "ConnectionError: another rank has gone\n",
            "rank 3 on node2 was ended by signal 9 (Killed; cause unknown)",
        ),
        (
            "srun: error: node2: task 2: Exited with exit code 1\nsrun: error: node2: task 3: Killed\n" + FORCED,
            "RuntimeError: Connection closed by peer [10.0.0.2]:4711\n",
            "rank 3 on node2 was ended by signal 9 (Killed",
        ),
        (
            "srun: error: node2: tasks 2-3: Out Of Memory\n",
            "",
            "ranks 2-3 on node2 needed more memory than Slurm allocated",
        ),
        (
            "srun: error: node1: task 0: Exited with exit code 1\nsrun: error: node2: task 1: Killed\n",
            "ValueError: the cause\n",
            "ValueError: the cause (attempts/001/logs/0.0.log)",
        ),
        (
            "srun: error: node1: task 1: Terminated\nsrun: error: node1: task 0: Segmentation fault (core dumped)\n",
            "",
            "rank 0 on node1 was ended by signal 11 (Segmentation fault)",
        ),
        (
            "srun: error: node1: tasks 0-1: Exited with exit code 127\n",
            "",
            "ranks 0-1 on node1 exited with exit code 127",
        ),
        (STEP + FORCED, "", "Slurm ended the ranks on node1 at 2026-11-22T20:28:16: node failure"),
    ],
)
def test_srun_names_the_node_the_rank_and_the_signal(srun, rank, expected, attempt):
    """A killed rank read "srun: Force Terminated"."""
    (attempt.path / "logs" / "srun.log").write_text(srun)
    assert diagnosis(attempt, rank).cause.startswith(expected)


def test_a_requeue_is_no_failure_that_says_nothing(attempt, monkeypatch):
    """The same job has begun once more, so Slurm has requeued it, and its user's recipe has not failed."""
    run = RunFolder(attempt.path.parents[1])
    attempt.mark("running", job="7")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert guard.reason_to_stop(run, idle_attempts=9, failures=0) is None
    assert attempt.result["state"] == "requeued"
    assert attempt.result["message"].startswith("Slurm requeued job 7: its node failed, it was preempted")
    (attempt.path / "logs" / "srun.log").write_text(STEP)
    later = run.new_attempt(job="7")
    later.mark("running", job="7")
    (later.path / "logs" / "srun.log").write_text(STEP)
    guard.reason_to_stop(run, idle_attempts=9, failures=0)
    assert later.result["message"].endswith("Slurm ended the ranks on node1 at 2026-11-22T20:28:16: node failure")


def test_an_attempt_of_another_job_that_was_killed_has_failed(attempt, monkeypatch):
    attempt.mark("running", job="7")
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    reason = guard.reason_to_stop(RunFolder(attempt.path.parents[1]), idle_attempts=9, failures=0)
    assert "1 attempts failed" in str(reason)


def test_each_node_s_log_is_read_once(attempt, monkeypatch):
    """512 KiB of each of 2,048 nodes, three or four times over."""
    (attempt.path / "logs" / "srun.log").write_text(STEP)
    for node in range(4):
        (attempt.path / "logs" / f"{node}.log").write_text(f"{node}: a line\n")
    reads, real = [], diagnose.read
    monkeypatch.setattr(diagnose, "read", lambda log, tail: reads.append((log.name, tail)) or real(log, tail))
    assert summarize(RunFolder(attempt.path.parents[1]), attempt).cause.startswith("Slurm ended the ranks on node1")
    assert sorted(name for name, _ in reads) == [*(f"{node}.log" for node in range(4)), "srun.log"]
    assert all(tail <= 512 * 1024 for _, tail in reads)


def test_all_hung_ranks_of_a_node_are_named_whose_monitors_write_without_a_rank(attempt):
    words = "[RankMonServer{0}@n1:{0}] Did not get subsequent heartbeat. Waited 30.00 seconds.\n"
    (attempt.path / "logs" / "1.log").write_text("8: a line\n" + words.format(8) + words.format(9))
    cause = summarize(RunFolder(attempt.path.parents[1]), attempt).cause
    assert cause.startswith("no heartbeat of rank 8 on n1, rank 9 on n1 for 30 s")
