"""Heartbeats cost a small write a node, whatever the ranks and steps, and still name the rank."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from superpod.runtime.heartbeat import heartbeat, heartbeat_pages, node_board, stall
from superpod.runtime.heartbeat.heartbeat import Heartbeat, write_every_s
from superpod.runtime.heartbeat.heartbeat_pages import PAGE, RankLocation
from superpod.runtime.heartbeat.node_board import PREFIX
from tests.conftest import ROOT

RANK = """
import os, sys, time
from pathlib import Path
from superpod.runtime.heartbeat.heartbeat import Heartbeat
beat = Heartbeat(Path(sys.argv[1]), int(os.environ["RANK"]), float(sys.argv[2]))
beat.begin()
hold = Path(sys.argv[3])
for step in range(10**6):
    if not hold.exists():
        beat.beat(step, "train")
    time.sleep(0.05)
"""


@pytest.fixture
def attempt(run):
    return run.new_attempt()


@pytest.fixture
def folder(attempt):
    return attempt.path / "heartbeat"


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    """The memory of the nodes of one test."""
    where = tmp_path / "shm"
    where.mkdir()
    monkeypatch.setattr(node_board, "shared_memory_folders", lambda: [where])
    return where


def ranks_of(folder, node, size, nodes, **options):
    return [
        Heartbeat(folder, node * size + i, place=RankLocation(node, i, size, nodes * size), **options)
        for i in range(size)
    ]


@pytest.fixture
def calls(monkeypatch):
    """The calls that the runtime makes on files outside of the node's memory."""
    made = []
    for name in ("open", "pwrite"):
        real = getattr(os, name)

        def counted(*args, name=name, real=real, **more):
            result = real(*args, **more)
            handle = result if name == "open" else args[0]
            if "/shm/" not in os.readlink(f"/proc/self/fd/{handle}"):
                made.append(name)
            return result

        monkeypatch.setattr(os, name, counted)
    return made


# -- what it costs ---------------------------------------------------------------------------------------------------


def test_a_node_opens_one_file_and_writes_once_an_interval_whatever_its_steps(folder, calls):
    ranks = ranks_of(folder, 0, 8, 1, every_s=15.0)
    began = time.time()
    for second in range(61):
        for step in range(20):
            for rank in ranks:
                rank.beat(20 * second + step, "train")
                rank.tick(began + second)
    assert calls.count("open") == 1
    assert calls.count("pwrite") <= 1 + 61 / 15
    assert [path.name for path in folder.iterdir()] == ["nodes"]


def test_two_thousand_nodes_write_at_most_once_in_ten_seconds_each():
    for nodes in (1, 16, 256, 2048, 8192):
        assert write_every_s(600, nodes) >= 10
        assert nodes / write_every_s(600, nodes) <= nodes / 10
    assert write_every_s(600, 16384) <= 600 / 3, "the limit needs a few writes all the same"
    assert write_every_s(12, 4) < 1


def test_the_nodes_do_not_all_write_at_once(folder):
    boards = [ranks_of(folder, node, 1, 100, every_s=10.0)[0] for node in range(100)]
    now = time.time()
    for rank in boards:
        rank.beat(0, "start")
        rank.tick(now)
    dues = sorted(rank._board.due - now for rank in boards)
    assert dues[0] > 3
    assert dues[-1] <= 10
    assert max(b - a for a, b in itertools.pairwise(dues)) < 0.5


def test_the_watcher_looks_as_often_as_its_limit_needs(attempt, folder, monkeypatch):
    looks = []
    read = heartbeat_pages.read
    monkeypatch.setattr(heartbeat_pages, "read", lambda *args: looks.append(1) or read(*args))
    (rank,) = ranks_of(folder, 0, 1, 1, every_s=0.0)
    watch, now = stall.StallDetector(attempt, 600, time.time()), time.time()
    rank.beat(1, "train")
    for second in range(600):
        assert watch.check(now + second) is None
    assert len(looks) <= 3, "of 600 polls"
    silent = [second for second in range(600, 700) if watch.check(now + second)]
    assert silent[0] <= 601, "at the limit, not a look later"


# -- what it tells ---------------------------------------------------------------------------------------------------


def test_every_rank_is_read_in_one_go_with_its_facts(attempt, folder):
    for node in range(3):
        for rank in ranks_of(folder, node, 12, 3, every_s=0.0):
            rank.beat(rank.rank, "train", allocated_gib=rank.rank / 2)
    beats = attempt.heartbeats()
    assert sorted(beats) == list(range(36))
    assert all(beat["step"] == rank and beat["allocated_gib"] == rank / 2 for rank, beat in beats.items())
    assert {beat["node"] for beat in beats.values()} == {0, 1, 2}
    assert (folder / "nodes").stat().st_size == 3 * 2 * PAGE, "twelve ranks take two pages"
    assert attempt.heartbeat(0) == beats[0]
    assert attempt.heartbeat(35) == beats[35]
    assert attempt.heartbeat(36) == {}


def test_an_end_is_written_before_the_process_is_gone_and_leaves_no_file_in_memory(attempt, folder, memory):
    ranks = ranks_of(folder, 0, 2, 1, every_s=1000.0)
    ranks[0].beat(3, "failed", error="ValueError: " + "x" * 2000)
    assert attempt.heartbeat(0)["error"].startswith("ValueError: xxx")
    ranks[1].beat(3, "stopped", signal="SIGTERM", checkpoint=True)
    assert attempt.heartbeat(1)["signal"] == "SIGTERM"
    for rank in ranks:
        rank.end()
    assert list(memory.iterdir()) == []


def test_the_longest_save_is_kept_for_the_time_limits_to_come(run, attempt, folder):
    from superpod.runtime.attempts import guard

    (rank,) = ranks_of(folder, 0, 1, 1, every_s=0.0)
    for seconds in (400.0, 20.0):
        rank.beat(1, "saved", seconds)
    rank.beat(2, "train")
    assert guard.save_seconds(run, 300) == 800


def test_a_torn_record_is_left_out_and_the_others_stand(attempt, folder):
    for rank in ranks_of(folder, 0, 3, 1, every_s=0.0):
        rank.beat(7, "train")
    with (folder / "nodes").open("r+b") as file:
        file.seek(RankLocation(0, 1, 3).record_at + 20)
        file.write(b"\xff" * 8)
    assert sorted(attempt.heartbeats()) == [0, 2]
    with (folder / "nodes").open("r+b") as file:
        file.truncate(1000)
    assert sorted(attempt.heartbeats()) == [0], "its record is whole"


def test_files_of_earlier_versions_are_read_too(attempt, folder):
    (folder / "0.jsonl").write_text('{"t": 1.0, "step": 3, "phase": "save", "save_s": 9.5}\n{"t": 2.0, "step": 4}\n')
    (folder / "11.jsonl").write_text('{"t": 2.0, "step": 4}\n')
    assert {rank: beat["step"] for rank, beat in attempt.heartbeats().items()} == {0: 4, 11: 4}
    assert attempt.heartbeat(11)["t"] == 2.0
    assert heartbeat_pages.longest_save_s(folder) == 9.5


# -- with real processes ---------------------------------------------------------------------------------------------


@pytest.fixture
def start(folder, tmp_path):
    """Start a rank of a node of four, which makes steps until there is a file `hold`: then it waits."""
    processes = []

    def begin(rank, node=0, every_s=0.2):
        place = {"RANK": node * 4 + rank, "LOCAL_RANK": rank, "GROUP_RANK": node, "LOCAL_WORLD_SIZE": 4}
        env = os.environ | {k: str(v) for k, v in place.items()} | {"WORLD_SIZE": "8", "PYTHONPATH": str(ROOT / "src")}
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder), str(every_s), str(tmp_path / "hold")], env=env
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        with contextlib.suppress(OSError):
            process.kill()
        process.wait()
    node_board.remove_stale_files(Path("/dev/shm"))


def until(true, limit_s=20.0):
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def wait_for(attempt, ranks):
    until(lambda: len(attempt.heartbeats()) == ranks)


def silence(attempt, limit_s=3.0):
    """What the watcher says, and after how many seconds."""
    watch, began = stall.StallDetector(attempt, limit_s, time.time()), time.monotonic()
    while time.monotonic() < began + 3 * limit_s:
        if words := watch.check():
            return words, time.monotonic() - began
        time.sleep(0.05)
    return "", 0.0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_another_rank_writes_when_the_one_that_wrote_is_killed_or_stopped(attempt, start, number):
    ranks = [start(i) for i in range(4)]
    wait_for(attempt, 4)
    os.kill(ranks[0].pid, number)
    gone = time.time()
    until(lambda: attempt.heartbeats()[3]["t"] > gone + 1.0)
    after = attempt.heartbeats()
    assert after[0]["t"] <= gone
    assert after[1]["seen"] > gone + 1.0, "rank 0 wrote until then"
    restarted = start(0)
    until(lambda: attempt.heartbeats()[0]["t"] > gone)
    assert restarted.poll() is None


@pytest.mark.slow
def test_a_rank_that_was_stopped_is_named_within_the_limit(attempt, start, tmp_path):
    ranks = [start(i) for i in range(4)]
    wait_for(attempt, 4)
    os.kill(ranks[2].pid, signal.SIGSTOP)
    assert silence(attempt, 1.0) == ("", 0.0), "the others make steps, so nothing is stalled"
    (tmp_path / "hold").touch()
    words, took_s = silence(attempt, 3.0)
    assert words.startswith("rank 2 on ")
    assert " no longer answers since step " in words
    assert took_s < 3.0 + 2.0


@pytest.mark.slow
def test_a_node_that_dies_is_named_with_its_ranks(attempt, start, tmp_path):
    ranks = [start(i) for i in range(4)] + [start(i, node=1) for i in range(4)]
    wait_for(attempt, 8)
    for process in ranks[4:]:
        process.kill()
    (tmp_path / "hold").touch()
    words, took_s = silence(attempt, 3.0)
    assert "(ranks 4-7) no longer answers since step" in words
    assert "(train)" in words
    assert took_s < 3.0 + 2.0


def test_a_rank_that_never_began_is_named_with_its_node(attempt, folder):
    attempt.mark("running", nodes=["n0", "n1"])
    for rank in [*ranks_of(folder, 0, 4, 2, every_s=0.0), *ranks_of(folder, 1, 4, 2, every_s=0.0)[1:]]:
        rank.beat(0, "start")
    now = time.time()
    assert stall.silent_rank(attempt.heartbeats(), stall.nodes_of(attempt), 30, 200, now + 200) is None
    words = stall.silent_rank(attempt.heartbeats(), stall.nodes_of(attempt), 30, 301, now + 301)
    assert words == "rank 4 on n1 has not begun after 301 s, and the others wait"


def test_killed_ranks_leave_nothing_in_memory_once_another_run_begins(attempt, start):
    process = start(0)
    wait_for(attempt, 1)
    held = [path for path in Path("/dev/shm").glob(f"{PREFIX}-*") if _is_held_by(process.pid, path)]
    assert len(held) == 1
    node_board.remove_stale_files(Path("/dev/shm"))
    assert held[0].exists(), "a living rank holds it"
    process.kill()
    process.wait()
    node_board.remove_stale_files(Path("/dev/shm"))
    assert not held[0].exists()


def _is_held_by(pid, path):
    return any(os.path.realpath(link) == str(path) for link in Path(f"/proc/{pid}/fd").iterdir())


# -- bad luck --------------------------------------------------------------------------------------------------------


def test_without_room_in_memory_each_rank_writes_its_own_record(attempt, folder, monkeypatch):
    monkeypatch.setattr(node_board, "shared_memory_folders", lambda: [Path("/nowhere"), Path("/dev/full")])
    for rank in ranks_of(folder, 0, 12, 1, every_s=5.0):
        rank.beat(4, "train")
        rank.tick(time.time() + 60)
    assert sorted(attempt.heartbeats()) == list(range(12))


def test_a_rank_that_fell_back_to_another_memory_leaves_the_others_records_as_they_are(
    attempt, folder, tmp_path, monkeypatch
):
    """No room in /dev/shm once ranks 0 to 2 are there, and rank 3 wrote zeros for them."""
    (tmp_path / "tmp").mkdir()
    places = [tmp_path / "shm", tmp_path / "shm", tmp_path / "shm", tmp_path / "tmp"]
    ranks = []
    for rank, where in enumerate(places):
        monkeypatch.setattr(node_board, "shared_memory_folders", lambda where=where: [where])
        ranks.append(Heartbeat(folder, rank, 10.0, RankLocation(0, rank, 4, 4)))
        ranks[rank].beat(5, "train")
    now = time.time()
    for writes in ((0, 3), (3, 0)):
        now += 100
        for rank in writes:
            ranks[rank].tick(now)
            assert {0, 1, 2} <= set(attempt.heartbeats())
        assert sorted(attempt.heartbeats()) == [0, 1, 2, 3]


def test_a_full_disk_costs_beats_and_nothing_else(attempt, folder):
    (folder / "nodes").symlink_to("/dev/full")
    (rank,) = ranks_of(folder, 0, 1, 1, every_s=0.0)
    rank.beat(1, "train")
    (folder / "nodes").unlink()
    rank.beat(2, "train")
    assert attempt.heartbeat()["step"] == 2


def test_a_disk_that_fills_up_later_still_takes_what_is_overwritten(attempt, tmp_path):
    """As root on a small tmpfs; a page that has been written needs no more room."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(small)], capture_output=True).returncode:
        pytest.skip("no root: cannot mount a small disk")
    try:
        (rank,) = ranks_of(small, 0, 1, 1, every_s=0.0)
        rank.beat(1, "train")
        with contextlib.suppress(OSError), (small / "fill").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        rank.beat(2, "train")
        beats = heartbeat_pages.read(small)
        rank.end()
        os.close(rank._file)
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
    assert beats is not None
    assert beats[0]["step"] == 2


def test_clocks_that_differ_make_no_stall(attempt, folder, monkeypatch):
    """One node's clock an hour ahead, one an hour behind: while any rank moves nothing is stalled, and a stall is."""
    now = time.time()
    ranks = [ranks_of(folder, node, 1, 3, every_s=0.0)[0] for node in range(3)]
    for rank, ahead in zip(ranks, (0, 3600, -3600), strict=True):
        monkeypatch.setattr(heartbeat.time, "time", lambda ahead=ahead: now + ahead)
        rank.beat(1 + rank.rank, "train")
    monkeypatch.undo()
    for later in (20, 40):
        for rank, ahead in zip(ranks, (0, 3600, -3600), strict=True):
            rank.tick(now + later + ahead)
        words = stall.silent_rank(attempt.heartbeats(), stall.nodes_of(attempt), 30, later, now + later)
        assert bool(words) == (later > 30)


def test_a_clock_that_is_set_back_stops_no_writes(attempt, folder):
    (rank,) = ranks_of(folder, 0, 1, 1, every_s=10.0)
    rank.beat(1, "train")
    now = time.time()
    rank.tick(now)
    rank.tick(now - 3600)
    assert attempt.heartbeat()["seen"] == now - 3600
