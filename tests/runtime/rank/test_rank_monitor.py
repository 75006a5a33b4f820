"""The real rank monitor of nvidia-resiliency-ext beside a process that plays a rank; a real hang is a drill."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.nemo

RANK = """
import json, os, signal, sys, time
from pathlib import Path

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
from superpod.runtime.rank import rank_monitor

pid = rank_monitor.start(Path(sys.argv[1]))
from nvidia_resiliency_ext import fault_tolerance as ft

client = ft.RankMonitorClient()
client.init_workload_monitoring()
client.send_heartbeat()
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
    os.kill(pid, number)
time.sleep(2)
client.send_heartbeat()
socket = Path(os.environ["FT_RANK_MONITOR_IPC_SOCKET"])
sockets = sorted(path.name for path in socket.parent.iterdir())
print(json.dumps({"monitor": pid, "folder": str(socket.parent), "mode": socket.parent.stat().st_mode & 0o777,
                  "sockets": sockets}))
"""


@pytest.mark.slow
def test_it_outlives_signals_and_not_its_rank(tmp_path):
    """A warning before the limit and Ctrl-C reach every process of a step: the heartbeats after them must arrive."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RANK, str(tmp_path)], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    assert not os.path.exists(f"/proc/{printed['monitor']}")
    assert printed["mode"] == 0o700, "what comes through the sockets is unpickled"
    assert printed["sockets"] == [f"_ft_launcher{printed['monitor']}_to_rmon.socket", "rank.socket"]
    assert not os.path.exists(printed["folder"])
    assert (tmp_path / "ft_state").is_dir()
