"""A stand-in for the training, in place of rank.py, for tests of everything around the ranks.

It starts in a second, makes steps that every rank must meet for (over TCP, through the node's own cable), saves and
resumes checkpoints in NeMo's layout, writes metrics, heartbeats and the done marker with the real runtime, and stops on
the same signals. Its loss is a chain of hashes over all steps, so that a lost or repeated step changes every later one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(1, os.environ["SUPERPOD_CODE"])

from superpod.common.json_files import append_line, write_json
from superpod.common.locks import RANKS, acquire_shared
from superpod.runtime.checkpoints import manifest, resume
from superpod.runtime.checkpoints.saved_checkpoints import own_files
from superpod.runtime.heartbeat.heartbeat import Heartbeat
from superpod.runtime.rank import rank as runtime
from superpod.runtime.rank.capture import capture_output
from superpod.runtime.rank.stopping import Deadline, StopSignals

LOCK_STEP_S = 600.0


class Meeting:
    """Every rank sends a number and receives the maximum at each step; a missing rank blocks the others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        at = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if rank == 0:
            server = socket.create_server(("", at[1]), reuse_port=False)
            self.files = [server.accept()[0].makefile("rw") for _ in range(size - 1)]
        else:
            end = time.monotonic() + 60
            while True:
                with contextlib.suppress(OSError):
                    connection = socket.create_connection(at, timeout=5)
                    connection.settimeout(None)
                    self.files = [connection.makefile("rw")]
                    break
                if time.monotonic() > end:
                    raise TimeoutError("rank 0 does not answer")
                time.sleep(0.1)

    def largest(self, number: int, ballast: str = "") -> int:
        """The largest of all ranks' numbers; `ballast` is sent along, to feel a slow cable."""
        if self.rank == 0:
            largest = max([number, *(int(self._read(f)) for f in self.files)])
            for file in self.files:
                self._write(file, f"{largest}")
            return largest
        self._write(self.files[0], f"{number} {ballast}")
        return int(self._read(self.files[0]))

    def _read(self, file) -> str:
        line = file.readline()
        if not line:
            raise ConnectionError("Connection closed by peer: another rank has gone")  # gloo's words
        return line.split()[0]

    def _write(self, file, text: str) -> None:
        file.write(text + "\n")
        file.flush()


def newest(folder: Path) -> tuple[int, str]:
    """Step and loss state of the checkpoint linked for this attempt, in the place where NeMo looks for it."""
    links = list(folder.glob("*-last"))
    if not links:
        return 0, "begin"
    (link,) = links
    state = json.loads((link / "weights" / "common.pt").read_text())
    return state["step"], state["chain"]


def save(folder: Path, step: int, chain: str, takes_s: float, run: Path, attempt: str) -> None:
    """As NeMo does: the marker first, the weights slowly, Megatron's metadata last; the older ones go."""
    attempts = max(p.name for p in (run / "attempts").iterdir())
    if int(attempts) > int(attempt):
        raise RuntimeError(f"attempt {attempts} has taken this run over")
    name = f"step={step - 1}-consumed_samples={step * 8}.0-last"
    (folder / f"{name}-unfinished").touch()
    weights = folder / name / "weights"
    weights.mkdir(parents=True, exist_ok=True)
    with (weights / "__0_0.distcp").open("wb") as file:
        for _ in range(20):
            file.write(os.urandom(16 * 1024))
            file.flush()
            time.sleep(takes_s / 20)
    (weights / "common.pt").write_text(json.dumps({"step": step, "chain": chain}))
    (weights / "metadata.json").write_text('{"sharded_backend": "toy"}')
    (folder / f"{name}-unfinished").unlink()
    resume.record_saved(run, folder / name)
    manifest.write_part(folder / name, "0", own_files(folder / name, 0, 1), parts=1)
    for old in sorted(folder.glob("step=*-last"), key=lambda p: p.stat().st_mtime)[:-3]:
        for file in sorted(old.rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
        old.rmdir()


def train(run: Path, attempt: Path, options: dict) -> None:
    """Steps until the last one, a signal, or the deadline."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    beat = Heartbeat(attempt / "heartbeat", rank, 0.2)
    beat.begin()
    beat.beat(0, "start")
    held = acquire_shared(run / RANKS) if os.environ["LOCAL_RANK"] == "0" else None
    signals, deadline, meeting = StopSignals(), Deadline.from_environ(os.environ), Meeting(rank, size)
    step, chain = newest(attempt / resume.FOLDER)
    signals.install()
    if options.get("crash_at") == step:
        print(f"rank {rank} begins at step {step}", flush=True)
        meeting.largest(0)  # torchrun ends the others as soon as one fails: first, let all have written
        raise ValueError("planted: the recipe is wrong")
    while step < options["max_steps"]:
        began = time.monotonic()
        beat.beat(step, "train")
        time.sleep(options["step_s"])
        chain = hashlib.sha256(f"{chain} {step}".encode()).hexdigest()
        received = signals.received
        if deadline.is_near(options["step_s"]):
            received = received or signal.SIGUSR1
        stop = meeting.largest(received, "x" * options.get("ballast", 0))
        step += 1
        if rank == 0:
            seconds = time.monotonic() - began
            append_line(
                run / "metrics.jsonl",
                {"t": time.time(), "attempt": attempt.name, "step": step, "loss": int(chain[:8], 16) / 2**32,
                 "step_time_s": seconds, "tokens_per_s_per_gpu": 100 / seconds},
            )  # fmt: skip
        if stop or step % options["save_every"] == 0 or step == options["max_steps"]:
            beat.beat(step, "save")
            saving = time.monotonic()
            if rank == 0:
                save(run / "checkpoints", step, chain, options.get("save_s", 0.1), run, attempt.name)
            meeting.largest(0)
            deadline.record_save(time.monotonic() - saving)
            beat.beat(step, "saved", save_s=time.monotonic() - saving)
        if stop:
            beat.beat(step, "stopped", signal=signal.Signals(stop).name)
            return
    if rank == 0:
        write_json(run / "done", {"t": time.time(), "attempt": attempt.name, "step": step})
    beat.beat(step, "done")
    del held


if __name__ == "__main__":
    os.environ.update(runtime.torch_variables(os.environ))
    where = Path(os.environ["SUPERPOD_RUN_DIR"])
    here = where / "attempts" / os.environ["SUPERPOD_ATTEMPT"]
    options = json.loads(Path(sys.argv[1]).read_text().partition("OPTIONS = ")[2])
    capture_output(here)
    if options.get("tell") and os.environ["RANK"] == "0":
        environment = {name: os.environ.get(name) for name in options["tell"]}
        write_json(where / "told.json", environment | {"files at home": sorted(os.listdir(os.path.expanduser("~")))})
    train(where, here, options)
