"""What `recipes status` copies of runs behind SSH; the shell commands of the real thing, without SSH."""

import pytest

from superpod.node import node_board
from superpod.node.heartbeat import Heartbeat
from superpod.node.heartbeat_pages import Place
from superpod.node.run_folder import Attempt
from superpod.slurm import connection, mirror


@pytest.mark.parametrize("nodes", [2, 3000])
def test_finding_13_heartbeats_are_copied_however_many_nodes(run, nodes, tmp_path, monkeypatch):
    """Issue 14: the file of 3,000 nodes is larger than anything else that is copied."""
    monkeypatch.setattr(node_board, "memory", lambda: [tmp_path])
    attempt = run.new_attempt()
    for rank in (0, 2 * nodes - 1):
        place = Place(node=rank // 2, local_rank=rank % 2, local_size=2, size=2 * nodes)
        Heartbeat(attempt.path / "heartbeat", rank, every_s=0.0, place=place).beat(9, "train")
    runs = run.path.parents[1]
    copy = mirror.fetch(connection.Connection(), str(runs))
    copied = Attempt(copy.path / attempt.path.relative_to(runs))
    assert copied.heartbeats() == attempt.heartbeats()
    assert sorted(copied.heartbeats()) == [0, 2 * nodes - 1]
