"""`recipes finetune` whose launcher is killed or stopped at any moment: real processes of NeMo, real signals.

No process is left after a minute, the state is the truth, no folder is half written, and `--resume` goes on from the
newest checkpoint, with what its overrides say or not at all.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from superpod.runtime.runs import pending_export
from superpod.runtime.runs.run_folder import RunFolder
from tests.launch.finetuning.test_finetune import run_module
from tests.weights import tiny

pytestmark = [pytest.mark.nemo, pytest.mark.train, pytest.mark.timeout(4000)]

NAME = "tiny_llama3_sft"
EVERY = 5
"""Steps between two validations, and so between two checkpoints."""
ONE = ["trainer.devices=1", "trainer.strategy.tensor_model_parallel_size=1", "trainer.strategy.sequence_parallel=False"]
SHORT = ["data.seq_length=64", "data.global_batch_size=8", f"trainer.val_check_interval={EVERY}"]
LIMIT_S = 900
"""Seconds until a moment comes, on a machine with other work."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model and data; the model is imported once, by the first run that gets so far."""
    folder = tmp_path_factory.mktemp("killed")
    run_module("tests.weights.tiny", folder / "model")
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, (r for r in tiny.sums(200) if "prompt" in r))))
    return folder


class Tuning:
    """`recipes finetune` as a process in a new folder, with its growing run."""

    def __init__(self, place: Path, *words: str) -> None:
        self.place, self.runs = place, place / "runs"
        command = [sys.executable, "-m", "superpod.cli", "finetune", NAME, *words]
        environ = {**os.environ, "COLUMNS": "200"}
        with (place / "log.txt").open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=place, env=environ, stdout=log, stderr=log, start_new_session=True
            )

    @classmethod
    def new(cls, place: Path, steps: int = 40) -> "Tuning":
        words = ["--model", str(place / "model"), "--data", str(place / "data.jsonl"), "--validation", "0.1"]
        return cls(place, *words, "--steps", str(steps), *SHORT, *ONE)

    @property
    def run(self) -> RunFolder | None:
        return RunFolder.latest(self.runs, NAME)

    def until(self, moment: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not MOMENTS[moment](self) and time.monotonic() < deadline:
            assert self.process.poll() is None, self.printed()
            time.sleep(0.01 if moment == "save" else 0.05)
        assert MOMENTS[moment](self) or moment == "save", self.printed()

    def ended(self, limit_s: float = LIMIT_S) -> int:
        try:
            return self.process.wait(limit_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def printed(self) -> str:
        return (self.place / "log.txt").read_text(errors="replace")[-4000:]


def last_step(tuning):
    lines = tuning.run.metrics() if tuning.run else []
    return lines[-1]["step"] if lines else 0


def has_ranks(tuning):
    return bool(tuning.run and any(list((a.path / "logs").iterdir()) for a in tuning.run.attempts[-1:]))


MOMENTS = {
    "start": lambda t: bool(t.run and t.run.attempts),
    "import": lambda t: any((t.runs / ".models").glob(".model-*-????????")),
    "before step 1": has_ranks,
    "training": lambda t: last_step(t) % EVERY == 2 and last_step(t) > EVERY,
    "save": lambda t: bool(t.run and last_step(t) >= EVERY and list(t.run.checkpoints.glob("*-unfinished"))),
    "export": lambda t: bool(t.run and t.run.done and list(t.run.path.glob(".hf-????????"))),
}
BEFORE_RANKS = ("start", "import")


def processes_in(place):
    """Processes that work in a folder, and those of its attempts."""
    import psutil

    there = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and (
                Path(process.cwd()) == place or str(place) in process.environ().get("SUPERPOD_ATTEMPT_DIR", "")
            ):
                there.append(" ".join(process.cmdline())[:200])
    return there


def none_left(place, limit_s=60):
    deadline = time.monotonic() + limit_s
    while (left := processes_in(place)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left == [] or left


def codes(moment, number):
    """Exit codes of a launcher: 130, or the signal's if it arrives before there is a run."""
    if number == signal.SIGKILL:
        return (-number,)
    return {"start": (130, 128 + number), "export": (1, 130, 128 + number)}.get(moment, (130,))


def stopped(tuning, moment, number):
    """Send the signal at the given time and check the invariants; return the last step."""
    tuning.until(moment)
    step = last_step(tuning)
    tuning.process.send_signal(number)
    code = tuning.ended(240)
    assert none_left(tuning.place) is True
    assert code in codes(moment, number), tuning.printed()
    run = tuning.run
    tidied = moment in BEFORE_RANKS and number != signal.SIGKILL  # a new run that was stopped before its ranks
    assert (run is None) == tidied, tuning.printed()
    if run is None:
        return 0
    state = run.status()
    if number == signal.SIGKILL:
        state = with_the_watchers_word(run)
    assert state.state in ("failed", "cancelled"), state
    if number == signal.SIGKILL:
        assert "was killed at 20" in state.message, state
        assert f"`recipes finetune {NAME} --resume {run.path}` resumes it" in state.message
    if moment == "export":
        assert "hf was not written" in state.message, state
    assert not (run.path / "hf").exists() or moment == "export", "it may be in place, whole, and not be recorded"
    return step


def with_the_watchers_word(run, limit_s=10):
    """The status once the watcher, which works in no folder of the run, has written how the launcher ended."""
    deadline = time.monotonic() + limit_s
    while "was killed at" not in run.status().message and time.monotonic() < deadline:
        time.sleep(0.1)
    return run.status()


def goes_on(place, step, *words):
    """The run ends as done, with its folder, and has repeated at most one interval."""
    before = RunFolder.latest(place / "runs", NAME)
    earlier = [attempt.name for attempt in before.attempts] if before else []
    tuning = Tuning(place, "--resume", "last", *words)
    assert tuning.ended() == 0, tuning.printed()
    run = tuning.run
    assert run
    assert run.status().state == "done", tuning.printed()
    repeated = [line["step"] for line in run.metrics() if line["attempt"] not in earlier]  # none, if it only exports
    assert not repeated or repeated[0] > step - EVERY, (repeated[0], step)
    hf = run.path / "hf"
    assert json.loads((hf / "config.json").read_text())["model_type"] == "llama"
    assert list(hf.glob("*.safetensors"))
    assert pending_export.folder_of(run.path) is None
    assert [*run.path.glob(".hf-*"), *(place / "runs" / ".models").glob(".model-*-????????")] == []
    return run


@pytest.fixture
def fresh(place, tmp_path):
    """A folder for one run, which shares an already imported model."""
    (tmp_path / "model").symlink_to(place / "model")
    (tmp_path / "data.jsonl").symlink_to(place / "data.jsonl")
    return tmp_path


@pytest.mark.long
def test_launcher_killed_during_import(fresh):
    stopped(Tuning.new(fresh), "import", signal.SIGKILL)


@pytest.mark.long
def test_run_killed_in_training_and_export_ends_done(fresh):
    step = stopped(Tuning.new(fresh), "training", signal.SIGKILL)
    refused = Tuning(fresh, "--resume", "last", "optim.config.lr=1e-5")
    assert refused.ended(120) == 2
    assert "optim.config.lr" in refused.printed()
    longer = Tuning(fresh, "--resume", "last", "--steps", "60")
    assert longer.ended(120) == 2
    assert "would not change the weights" in longer.printed()
    assert step > EVERY
    stopped(Tuning(fresh, "--resume", "last", "trainer.max_steps=20"), "export", signal.SIGKILL)
    run = goes_on(fresh, step)
    assert run.metrics()[-1]["step"] == 20, "the override of the attempt that was killed in its export holds"


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
@pytest.mark.parametrize("moment", MOMENTS)
def test_launcher_stopped_at_any_time(moment, number, fresh):
    step = stopped(Tuning.new(fresh), moment, number)
    if moment not in BEFORE_RANKS or number == signal.SIGKILL:
        goes_on(fresh, step)
    else:
        repeated = Tuning.new(fresh, steps=10)
        assert repeated.ended() == 0, repeated.printed()


@pytest.mark.long
def test_closed_terminal_saves_like_ctrl_c(fresh):
    step = stopped(Tuning.new(fresh), "training", signal.SIGHUP)
    run = RunFolder.latest(fresh / "runs", NAME)
    assert run
    assert run.status().message == "stopped by the user, checkpoint saved"
    goes_on(fresh, step, "--steps", "30")
    assert run.metrics()[-1]["step"] == 30
