"""Measurement of links between nodes, with stand-ins for GPUs and InfiniBand."""

import os
import stat
import subprocess
import sys

import pytest

from superpod.errors import UserError
from superpod.runtime.health import bandwidth
from superpod.slurm import node_health, slow_nodes
from superpod.slurm.profiles import profiles
from superpod.slurm.slow_nodes import choose_transport
from superpod.slurm.submission.connection import Connection

H100 = profiles.load("dgx_h100")
NODES = ["a", "b", "c"]


def test_node_checks_request_gpus():
    """With ConstrainDevices a job without GPUs sees none, so that every node would fail."""
    words = node_health.srun_on_nodes(H100, NODES)
    assert "--gpus-per-node=8" in words
    assert "--nodelist=a,b,c" in words
    assert words.index("--ntasks-per-node=8") < words.index("--ntasks-per-node=1")  # srun takes the last
    gres = H100.model_copy(update={"slurm": H100.slurm.model_copy(update={"gpus": "gres", "gpu_type": "h100"})})
    assert "--gres=gpu:h100:8" in node_health.srun_on_nodes(gres, NODES)


class FakeNodes(Connection):
    """A fake connection to three nodes with the given transports."""

    def __init__(self, **lacking: str) -> None:
        self.lacking: dict[str, str] = lacking
        self.commands: list[list[str]] = []

    def run(self, command: list[str], *, stdin: bytes = b"", env: dict[str, str] | None = None, limit_s: float = 60):
        self.commands.append(command)
        why = self.lacking.get(command[-1], "")
        if why.startswith("error"):
            raise UserError(f"srun: {why}")
        return "".join(f"obstacle\t{node}\t{why if node == 'b' else ''}\n" for node in NODES)


def test_bisect_uses_the_environment_of_training():
    """NCCL if all nodes have it, else ib_write_bw, else TCP, with the reasons."""
    nodes = FakeNodes()
    assert choose_transport(nodes, H100, NODES) == ("nccl", "")
    (command,) = nodes.commands
    assert f"NCCL_IB_HCA={H100.network.hcas}" in command
    assert f"--container-image={H100.container.image}" in command
    assert choose_transport(FakeNodes(nccl="no torch"), H100, NODES) == ("ib", "no nccl: b has no torch")
    neither = FakeNodes(nccl="error: no such image", ib="no ib_write_bw")
    assert choose_transport(neither, H100, NODES) == (
        "tcp",
        "no nccl: srun: error: no such image; no ib: b has no ib_write_bw",
    )


def test_unknown_transport_and_too_few_nodes_are_refused():
    with pytest.raises(UserError, match=r"must be one of nccl, .*'rdma'"):
        slow_nodes.bisect(FakeNodes(), H100, NODES, transport="rdma")
    with pytest.raises(UserError, match="at least 3 nodes, not 2"):
        slow_nodes.bisect(FakeNodes(), H100, NODES[:2])


def test_network_reported_by_nccl(tmp_path):
    """Planted lines, in the form of NCCL 2.20 to 2.27."""
    assert bandwidth.used_network(str(tmp_path)) == ""
    (tmp_path / "nccl.1").write_text(
        "h:1:1 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB\nh:1:1 [0] NCCL INFO Using network IB\n"
    )
    assert bandwidth.used_network(str(tmp_path)) == " over IB"


FAKE_IB = """#!/bin/sh
# Not ib_write_bw: prints a table of its form; mlx5_3 is slow, and the first client of each HCA finds no server.
case " $* " in *" partner "*) if [ ! -e "$0.$2" ]; then touch "$0.$2"; echo "Couldn't connect" >&2; exit 1; fi;; esac
case $2 in mlx5_3) speed=97.50;; *) speed=390.10;; esac
echo " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]"
echo " 1048576    1024           391.22             $speed             0.046"
"""


def test_slowest_hca_of_a_pair_is_reported(tmp_path, monkeypatch):
    fake = tmp_path / "ib_write_bw"
    fake.write_text(FAKE_IB)
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    gb_s, how = bandwidth.measure_ib_pair(True, "partner", 29400, 1024, "mlx5_0,mlx5_3")
    assert how == "ib_write_bw, slowest mlx5_3"
    assert gb_s == pytest.approx(97.5 / 8)


def measured(transport: str, names: str) -> list[str]:
    """Run a pair of tasks on this machine like srun."""
    words: list[str] = [sys.executable, "-c", (node_health.RUNTIME / "bandwidth.py").read_text(), transport, "1", names]
    tasks = []
    for node in "01":
        env = {**os.environ, "SLURM_NODEID": node, "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "2"}
        command = [*words, "localhost", "127.0.0.1"]
        tasks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    outputs = [task.communicate(timeout=240)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0]
    (line,) = "".join(outputs).splitlines()
    return [*line.split("\t")]


def test_measurement_over_tcp():
    word, first, second, gb_s, how = measured("tcp", "lo")
    assert (word, first, second, how) == ("pair", "localhost", "127.0.0.1", "TCP over lo")
    assert float(gb_s) > 0
    assert measured("tcp", "nothere0")[-1] == "TCP by host name"


@pytest.mark.nemo  # torch comes with it
@pytest.mark.slow
def test_measurement_by_all_reduce():
    *_, gb_s, how = measured("gloo", "")
    assert how == "gloo"
    assert float(gb_s) > 0
