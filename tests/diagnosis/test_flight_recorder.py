"""PyTorch's flight-recorder dumps: who did not come to which collective; and that nothing but data is unpickled."""

import json
import os
import pickle

import pytest

from superpod.diagnosis import flight_recorder
from superpod.runtime.attempts import diagnose
from tests.diagnosis.test_why import CORPUS, named, root_of


def entry(number, state="completed", name="nccl:all_reduce", size=4, frames=()):
    return {
        "collective_seq_id": number,
        "state": state,
        "profiling_name": name,
        "process_group": ("0", "default_pg"),
        "input_sizes": [[size]],
        "is_p2p": False,
        "time_created_ns": number,
        "frames": list(frames),
    }


@pytest.fixture
def dumps(tmp_path):
    """Writes a flight-recorder dump a rank, as torch names them."""

    def write(by_rank, as_json=False):
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(sorted(by_rank))}}
        for rank, entries in by_rank.items():
            record = {"version": "2.10", "pg_config": config, "entries": entries}
            path = tmp_path / f"nccl_trace_rank_{rank}"
            path.write_bytes(json.dumps(record).encode() if as_json else pickle.dumps(record, protocol=2))
        return tmp_path

    return write


FRAME = {"name": "train_step", "filename": "/opt/train.py", "line": 12}


@pytest.mark.parametrize("as_json", [False, True])
def test_a_dump_names_the_rank_that_did_not_come_and_the_collective(as_json, dumps):
    waiting = [entry(1), entry(2), entry(3, "started", frames=[FRAME])]
    folder = dumps({0: waiting, 1: waiting, 2: [entry(1), entry(2, frames=[FRAME])], 3: waiting}, as_json)
    verdict = diagnose.judge_files(sorted(folder.iterdir()), folder)
    assert (named(verdict), root_of(verdict).ranks) == ("nccl_timeout", (2,))
    assert "rank 2 did not reach collective 3 (nccl:all_reduce)" in root_of(verdict).detail
    assert "train_step (train.py:12)" in root_of(verdict).detail


def test_a_dump_names_the_rank_that_called_something_else(dumps):
    folder = dumps(
        {
            rank: [entry(1), entry(2, "scheduled", "nccl:all_gather" if rank == 3 else "nccl:all_reduce")]
            for rank in range(4)
        }
    )
    verdict = diagnose.judge_files(sorted(folder.iterdir()), folder)
    assert (named(verdict), root_of(verdict).ranks) == ("collective_mismatch", (3,))


def test_dumps_that_torch_wrote_are_read():
    """Of torch 2.13 with Gloo, three ranks of which rank 1 left out the third all_reduce (`_dump_fr_trace`)."""
    folder = CORPUS / "dumps"
    verdict = diagnose.judge_files(sorted(folder.iterdir()), folder)
    assert (named(verdict), root_of(verdict).ranks) == ("nccl_timeout", (1,))
    assert "rank 1 did not reach collective 3 (gloo:all_reduce)" in root_of(verdict).detail
    assert "train_step (fr.py:7)" in root_of(verdict).detail


class Evil:
    """What a dump of a stranger may hold."""

    def __reduce__(self):
        return os.system, (f"touch {os.environ['WHERE']}",)


def test_a_dump_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("WHERE", str(tmp_path / "touched"))
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps({"entries": [Evil()]}))
    assert flight_recorder.read(tmp_path / "nccl_trace_rank_0") is None
    assert not (tmp_path / "touched").exists()
