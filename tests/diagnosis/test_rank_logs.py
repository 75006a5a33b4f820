"""Logs are a file a node where srun starts the ranks, and still say which rank wrote what."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from superpod.diagnosis import flight_recorder, rank_logs
from superpod.reports.runs.logs import LogReader
from superpod.runtime.attempts.diagnose import summarize
from superpod.runtime.rank import capture, rank
from superpod.runtime.runs.run_folder import RunFolder

# As Slurm 22.05 wrote it on the testbed: whole lines of both ranks in turn, slurmstepd's own words without a label.
NODE_1 = """\
2: hello from 2
3: hello from 3
2: Traceback (most recent call last):
3: progress 1\rprogress 2\rprogress 3
2:   File "x.py", line 1
2: RuntimeError: Connection closed by peer
3: ValueError: heads 3 by tp 2
slurmstepd-node2: error: *** STEP 7.0 ON node2 CANCELLED AT 2026-11-22T20:28:16 DUE TO NODE FAILURE ***
2:
"""


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path, "tiny", facts={"gpus_per_node": 2}, recipe_lines=[])


@pytest.fixture
def attempt(run):
    attempt = run.new_attempt()
    (attempt.path / "logs" / "0.log").write_text("0: zero\n1: one\n")
    (attempt.path / "logs" / "1.log").write_text(NODE_1)
    return attempt


def test_the_cause_is_that_rank_s_last_error_among_the_lines_of_its_node(run, attempt):
    assert summarize(run, attempt).cause == "ValueError: heads 3 by tp 2 (attempts/001/logs/1.log, rank 3)"


def test_why_slurm_ended_a_step_is_read_from_a_node_s_file_too(run, attempt):
    (attempt.path / "logs" / "1.log").write_text(NODE_1.replace("ValueError", "a value"))
    assert (
        summarize(run, attempt).cause
        == "Slurm ended the ranks on node2 at 2026-11-22T20:28:16: node failure [node_failed]"
    )


def test_logs_shows_one_rank_of_a_node_s_file_or_all_with_their_ranks(run, attempt):
    assert list(LogReader(run).read_new()) == ["[001 node 0 rank 0] zero"]
    assert list(LogReader(run, rank=3).read_new()) == [
        "[001 node 1 rank 3] hello from 3",
        *(f"[001 node 1 rank 3] progress {i}" for i in (1, 2, 3)),
        "[001 node 1 rank 3] ValueError: heads 3 by tp 2",
    ]
    everything = list(LogReader(run, all_ranks=True).read_new())
    assert everything[:2] == ["[001 node 0 rank 0] zero", "[001 node 0 rank 1] one"]
    assert any(line.startswith("[001 node 1] slurmstepd-node2: error:") for line in everything)
    assert list(LogReader(run, rank=2, tail=2).read_new()) == [
        "[001 node 1 rank 2] RuntimeError: Connection closed by peer",
        "[001 node 1 rank 2] ",
    ]


def test_a_file_a_rank_of_earlier_and_local_runs_is_read_as_before(run):
    attempt = run.new_attempt()
    (attempt.path / "logs" / "0.1.log").write_text("5: no label\n")
    assert list(LogReader(run, rank=1).read_new()) == ["[001 node 0 rank 1] 5: no label"]
    assert rank_logs.tails(attempt.path / "logs" / "0.1.log") == [(1, "5: no label\n")]


def test_only_srun_is_given_a_file_a_node(tmp_path):
    command, environment = capture.log_by_node(["/usr/bin/srun", "-n2", "python"], tmp_path / "a 100%")
    output = f"--output={tmp_path}/a 100%%/logs/%n.log"
    assert command == ["/usr/bin/srun", "--label", output, "--open-mode=append", "-n2", "python"]
    assert environment == {capture.BY_NODE: "1"}
    assert capture.log_by_node(["mpirun", "python"], tmp_path) == (["mpirun", "python"], {})


def test_a_rank_whose_output_srun_keeps_makes_no_log_and_writes_line_by_line(attempt):
    """It is killed a moment after its last line, which was not flushed by itself."""
    script = """
import os, signal
from superpod.runtime.rank.capture import capture_output
assert capture_output(os.environ["WHERE"]) is None
print("the last words")
os.kill(os.getpid(), signal.SIGKILL)
"""
    before = sorted(attempt.logs)
    environment = {capture.BY_NODE: "1", "RANK": "0", "WHERE": str(attempt.path), "PYTHONPATH": ":".join(sys.path)}
    killed = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert (killed.returncode, killed.stdout) == (-9, "the last words\n"), killed.stderr
    assert sorted(attempt.logs) == before


CHILDREN = """
import multiprocessing, os, subprocess, sys, time
from superpod.runtime.rank import rank
from superpod.runtime.rank.capture import capture_output
def child(kind):
    print("words of the", kind, "child", flush=True)
    open(f"{os.environ['WHERE']}/{kind}.pid", "w").write(str(os.getpid()))
    os.write(2, b"and its errors\\n")
    time.sleep(60)
if __name__ == "__main__":
    capture_output(os.environ["WHERE"])
    rank.shield_children()
    for kind in ("fork", "spawn"):
        multiprocessing.get_context(kind).Process(target=child, args=(kind,)).start()
    subprocess.run(["echo", "a program's words"])
    while not all(os.path.exists(f"{os.environ['WHERE']}/{kind}.pid") for kind in ("fork", "spawn")):
        time.sleep(0.05)
    print("the rank's words")
    os.write(2, b"and its errors\\n")
    time.sleep(60)
"""


def test_children_of_a_killed_rank_do_not_hold_the_pipes_that_slurmstepd_reads(attempt, tmp_path):
    """slurmstepd would wait 60 s for them, and srun hear of the death as much later."""
    log = attempt.path / "logs" / "0.log"
    log.write_text("0: before\n")
    script = tmp_path / "ranked.py"
    script.write_text(CHILDREN)
    environment = {capture.BY_NODE: "1", "RANK": "0", "WHERE": str(attempt.path), "PYTHONPATH": ":".join(sys.path)}
    rank = subprocess.Popen([sys.executable, script], env=environment, stdout=-1, stderr=-1, text=True)
    try:
        assert rank.stdout
        assert rank.stderr
        out = [rank.stdout.readline(), rank.stdout.readline()]
        errors = rank.stderr.readline()
        rank.kill()
        killed = time.monotonic()
        rest = rank.communicate(timeout=30)
        assert time.monotonic() < killed + 2
        assert (out, errors) == (["a program's words\n", "the rank's words\n"], "and its errors\n")
        assert rest == ("", ""), "the children's words are not among them"
        children = [int((attempt.path / f"{kind}.pid").read_text()) for kind in ("fork", "spawn")]
        for pid in children:
            os.kill(pid, 0)  # they live on, or the test shows nothing
    finally:
        rank.kill()
        for file in attempt.path.glob("*.pid"):
            with contextlib.suppress(OSError):
                os.kill(int(file.read_text()), signal.SIGKILL)
    lines = [rank_logs.parse(log, line) for line in log.read_text().splitlines()]
    words = ["and its errors"] * 2 + ["words of the fork child", "words of the spawn child"]
    assert sorted((line.rank, line.text) for line in lines[1:]) == [(None, text) for text in words]


RECIPE = """
import os, sys
def recipe():
    import resource
    assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
    sys.exit(" ".join(f"{name}={value}" for name, value in os.environ.items() if "_TEMP_FILE" in name))
"""


def test_a_flight_recorder_writes_where_why_looks(run, attempt, tmp_path):
    """PyTorch's default is /tmp, which is the container's own; what the user has set stays."""
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE)
    slurm = {"PROCID": "3", "LOCALID": "1", "NODEID": "1", "NTASKS": "4", "NNODES": "2", "JOB_ID": "7"}
    environ = {f"SLURM_{name}": value for name, value in slurm.items()}
    environ |= {"SUPERPOD_RUN_DIR": str(run.path), "SUPERPOD_ATTEMPT": attempt.name, "SUPERPOD_LOGS_BY_NODE": "1"}

    def told(**more: str) -> dict[str, str]:
        command = [sys.executable, str(Path(rank.__file__)), str(recipe)]
        done = subprocess.run(command, env={**os.environ, **environ, **more}, capture_output=True, text=True)
        return dict(word.split("=") for word in done.stderr.strip().splitlines()[-1].split())

    place = str(attempt.path / "logs" / "nccl_trace_rank_")
    assert told() == {"TORCH_FR_DUMP_TEMP_FILE": place, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": place}
    mine = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine/trace_"}
    assert told(**mine) == mine
    dump = Path(f"{place}3")  # PyTorch adds the rank
    dump.write_bytes(pickle.dumps({"version": "2.4", "entries": []}))
    assert flight_recorder.files([attempt.path]) == [dump]
    assert [log.name for log in attempt.logs] == ["0.log", "1.log"], "a dump is not a log"
