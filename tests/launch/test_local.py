"""Real local runs: NeMo, Megatron-Core and torchrun on gloo, with real text, signals and a full disk."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from superpod.collection import registry
from superpod.runtime.runs.run_folder import RunFolder

pytestmark = [pytest.mark.nemo, pytest.mark.train]

SMALL = ("data.seq_length=64", "model.config.seq_length=64", "data.micro_batch_size=2", "data.global_batch_size=8")
TP1 = (
    "trainer.devices=1",
    "trainer.strategy.tensor_model_parallel_size=1",
    "trainer.strategy.sequence_parallel=False",
    "trainer.callbacks[2].tp_comm_overlap=False",
)
TP2 = (
    "trainer.devices=2",
    "trainer.strategy.tensor_model_parallel_size=2",
    "trainer.strategy.sequence_parallel=True",
)


class Running:
    """`recipes run ...` as a process, with its growing run folder."""

    def __init__(self, folder: Path, *words: str, runs: Path | None = None, env: dict[str, str] | None = None) -> None:
        self.runs = runs or folder / "runs"
        self.before = set(self.runs.glob("*/*"))
        self.made: Path | None = None
        command = [sys.executable, "-m", "superpod.cli", "run", *words, "--runs", str(self.runs)]
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "COLUMNS": "200", **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run_dir(self) -> RunFolder:
        if self.made is None:
            (self.made,) = set(self.runs.glob("*/*")) - self.before
        return RunFolder(self.made)

    def until_step(self, step: int, run: RunFolder | None = None, limit_s: float = 180) -> RunFolder:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(ValueError):
                run = run or self.run_dir()
            if run and (lines := run.metrics()) and lines[-1]["step"] >= step:
                return run
            time.sleep(0.05)
        raise AssertionError(f"step {step} was not reached; the command printed: {self.end()[1]}")

    def ranks(self) -> list[int]:
        import psutil

        ranks = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended since the children were listed
                command = child.cmdline()
                if "fdl_runner" in " ".join(command) and "torchrun" not in command[1]:
                    ranks.append(child.pid)
        return ranks

    def end(self, limit_s: float = 300) -> tuple[int, str]:
        try:
            output, _ = self.process.communicate(timeout=limit_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        assert "Traceback" not in output, output
        return self.process.returncode, output


def left_behind(run: RunFolder) -> list[str]:
    import psutil

    commands = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and str(run.path) in process.environ().get(
                "SUPERPOD_ATTEMPT_DIR", ""
            ):
                commands.append(" ".join(process.cmdline()))
    return commands


def losses(run: RunFolder) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in run.metrics()}


def back_to(run: RunFolder, checkpoint: str, path: Path) -> RunFolder:
    """Copy `run` in its state after it saved `checkpoint`."""
    shutil.copytree(run.path, path, symlinks=True)
    (kept,) = (path / "checkpoints").glob(checkpoint)
    for other in set((path / "checkpoints").iterdir()) - {kept}:
        other.unlink() if other.is_symlink() else shutil.rmtree(other)
    kept.with_name(f"{kept.name}-last").symlink_to(kept.name)
    (path / "done").unlink()
    return RunFolder(path)


@pytest.fixture(scope="module")
def text(tmp_path_factory, recipes_cli):
    """Two packages of the standard library as a data folder with a vocabulary of 512."""
    folder = tmp_path_factory.mktemp("text") / "a name with 'quotes'"
    library = Path(json.__file__).parents[1]
    source = ("--text", library / "email" / "*.py", "--text", library / "asyncio" / "*.py")
    done = recipes_cli("data", "build", *source, "--vocab-size", 512, "--split", "8,1,1", "--out", folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def folder(tmp_path):
    """A working directory with an awkward name, whose `recipes` package is not ours: NeMo-Run's children start here."""
    place = tmp_path / "it's a [b]ü"
    (place / "recipes").mkdir(parents=True)
    (place / "recipes" / "__init__.py").write_text("raise SystemExit('the decoy was imported')\n")
    return place


@pytest.mark.long
def test_tp_with_sp_reproduces_losses_of_one_rank(folder, text):
    """From one checkpoint, FP32, no dropout: 20 steps on one rank and on two differ by less than 1e-4."""
    reshardable = "trainer.strategy.ckpt_optim_fully_reshardable=True"
    words = ("tiny_llama3_fp32", *SMALL, "log.ckpt.every_n_train_steps=5", "log.ckpt.save_top_k=9", reshardable)
    one = Running(folder, *words, *TP1, "trainer.max_steps=25", "--data", str(text))
    code, output = one.end()
    assert code == 0, output
    copy = back_to(one.run_dir(), "step=4-*", folder / "two" / "tiny_llama3_fp32" / "copy")
    code, output = Running(folder, words[0], "--resume", str(copy.path), *TP2, runs=folder / "two").end()
    assert code == 0, output
    assert len(copy.attempts[-1].logs) == 2
    on_one, on_two = losses(one.run_dir()), losses(copy)
    assert min(line["step"] for line in copy.metrics() if line["attempt"] == "002") == 6
    assert max(abs(on_one[step] - on_two[step]) for step in range(6, 26)) < 1e-4
    assert on_one[25] < on_one[6]


@pytest.mark.slow
def test_killed_run_resumes_with_the_same_losses(folder, text):
    """kill -9 between two checkpoints: the resumed run's losses are the uninterrupted run's."""
    words = ("tiny_llama3", *SMALL, "--data", str(text))
    with socket.socket() as busy:  # torchrun's usual port is taken: a run chooses a free one
        with contextlib.suppress(OSError):
            busy.bind(("127.0.0.1", 29500))
            busy.listen()
        whole = Running(folder, *words, env={"MASTER_PORT": "29500"})
        code, output = whole.end()
    assert code == 0, output
    expected = losses(whole.run_dir())
    assert sorted(expected) == list(range(1, 61))

    killed = Running(folder, *words)
    run = killed.until_step(35)
    for pid in killed.ranks():
        os.kill(pid, signal.SIGKILL)
    code, output = killed.end()
    assert code == 1
    assert "killed" in output
    assert left_behind(run) == []
    assert run.state() == "failed"
    assert f"--resume {shlex.quote(str(run.path))}" in output

    code, output = Running(folder, "tiny_llama3", "--resume", "last").end()
    assert code == 0, output
    resumed = losses(run)
    from_second = [line["step"] for line in run.metrics() if line["attempt"] == "002"]
    assert min(from_second) == 31
    assert {step: resumed[step] for step in range(31, 61)} == pytest.approx(
        {step: expected[step] for step in range(31, 61)}, abs=1e-5
    )
    validated = [[line["step"] for line in r.metrics() if line["val_loss"] is not None] for r in (whole.run_dir(), run)]
    assert validated == [[20, 40, 60]] * 2
    assert run.state() == "done"


@pytest.mark.long
def test_ctrl_c_saves_and_the_next_run_continues(folder, text):
    secret = {"HF_TOKEN": "hf_neverwritten", "NEMO_URL": "https://h/x?access_token=neverwritten&a=b"}
    running = Running(folder, "tiny_llama3", *SMALL, "--data", str(text), "trainer.max_steps=40", env=secret)
    run = running.until_step(12)
    code, second = Running(folder, "tiny_llama3", "--resume", str(run.path), "trainer.max_steps=41").end()
    assert code == 2
    assert "is in use by pid" in second
    os.kill(running.process.pid, signal.SIGINT)
    code, output = running.end()
    assert code == 130
    assert "cancelled at step" in output
    assert "checkpoint saved" in output
    assert run.state() == "cancelled"
    files = {path.relative_to(run.path).as_posix(): path for path in run.path.rglob("*") if path.is_file()}
    of_run = {"run.json", "recipe.txt", "plan.json", "metrics.jsonl"}
    of_attempt = {"env.json", "result.json", "logs/0.0.log", "logs/0.1.log", "heartbeat/nodes"}
    assert of_run | {f"attempts/001/{name}" for name in of_attempt} <= set(files)
    assert "trainer.max_steps = 40\n" in files["recipe.txt"].read_text()
    assert json.loads(files["plan.json"].read_text())["layouts"][0]["layout"]["tp"] == 2
    assert "NEMO_URL" in files["attempts/001/env.json"].read_text()
    assert [name for name, path in files.items() if b"neverwritten" in path.read_bytes()] == []
    stopped = run.metrics()[-1]["step"]
    assert stopped < 40

    code, output = Running(folder, "tiny_llama3", "--resume", str(run.path)).end()
    assert code == 0, output
    assert min(line["step"] for line in run.metrics() if line["attempt"] == "002") == stopped + 1
    assert run.state() == "done"

    code, output = Running(folder, "tiny_llama3", "--resume", str(run.path)).end(limit_s=20)
    assert code == 2
    assert "is done" in output


@pytest.mark.parametrize("after_s", [1.0, 4.0])
@pytest.mark.slow
def test_interrupt_before_the_run_folder_exists(after_s, folder, text):
    running = Running(folder, "tiny_llama3", *SMALL, "--data", str(text))
    time.sleep(after_s)
    os.kill(running.process.pid, signal.SIGINT)
    code, output = running.end(limit_s=30)
    assert code == 130
    assert output.strip().splitlines()[-1] == "error: interrupted"
    assert not list((folder / "runs").glob("*/*"))


@pytest.mark.slow
def test_ranks_end_with_a_killed_launcher(folder, text):
    """kill -9 of the command before its ranks have imported NeMo: no rank continues."""
    running = Running(folder, "tiny_llama3", *SMALL, "--data", str(text), "trainer.max_steps=4")
    deadline = time.monotonic() + 300
    while not running.ranks() and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(running.process.pid, signal.SIGKILL)
    running.process.communicate(timeout=30)
    run = running.run_dir()
    deadline = time.monotonic() + 60
    while (left := left_behind(run)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
    while "ended" not in run.attempts[-1].result and time.monotonic() < deadline:
        time.sleep(0.1)
    status = run.status()
    assert status.state == "failed"
    assert f"pid {running.process.pid} on host {socket.gethostname()}, was killed at" in status.message
    assert f"`recipes run tiny_llama3 --resume {shlex.quote(str(run.path))}` resumes it" in status.message
    assert len(run.attempts) == 1


@pytest.mark.long
def test_full_disk_is_reported_and_run_resumes(folder, text):
    disk = folder / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=150m", "none", disk], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        words = ("tiny_llama3", *SMALL, "log.ckpt.every_n_train_steps=2", "log.ckpt.save_top_k=9")
        full = Running(folder, *words, "--data", str(text), runs=disk)
        code, output = full.end()
        assert code == 1, output
        assert "is full" in output
        assert full.run_dir().state() == "failed"
        refused = Running(folder, "tiny_llama3", "--resume", "last", runs=disk)
        code, output = refused.end(limit_s=20)
        assert code == 2, output
        assert "MiB are free" in output
        subprocess.run(["mount", "-o", "remount,size=2g", disk], check=True)
        code, output = Running(folder, "tiny_llama3", "--resume", "last", "trainer.max_steps=30", runs=disk).end()
        assert code == 0, output
        assert min(line["step"] for line in full.run_dir().metrics() if line["attempt"] == "002") > 1
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_read_only_folder_is_refused(folder, text):
    disk = folder / "read only"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", disk], capture_output=True).returncode:
        pytest.skip("mounting a read-only file system needs root")
    try:
        code, output = Running(folder, "tiny_llama3", "--data", str(text), runs=disk / "runs").end(limit_s=20)
        assert code == 2
        assert "Read-only file system" in output
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: (data / "text.idx").write_bytes(b"not an index"), "text.idx"),
        (lambda data: os.truncate(data / "text.bin", 10), "text.bin"),
        (lambda data: (data / "text.bin").unlink(), "text.bin"),
        (lambda data: shutil.rmtree(data / "tokenizer"), "tokenizer"),
        (lambda data: (data / "dataset.json").write_text("{"), "dataset.json"),
    ],
)
def test_damaged_data_is_refused_before_nemo_is_imported(damage, says, folder, text):
    copy = folder / "copy"
    shutil.copytree(text, copy)
    damage(copy)
    code, output = Running(folder, "tiny_llama3", "--data", str(copy)).end(limit_s=20)
    assert code == 2
    assert says in output
    assert not (folder / "runs").exists()


@pytest.mark.slow
def test_model_that_exceeds_memory_is_refused(folder, preloaded_cli):
    recipe = registry.find("llama31_405b_pretrain_h100_bf16")
    done = preloaded_cli("run", recipe.name, cwd=folder)
    assert done.returncode == 2
    message = " ".join(done.stderr.split())
    assert f"needs {8 * recipe.nodes[0]} processes" in message
    assert f"recipes rehearse {recipe.name}" in message
    assert "Traceback" not in message
    assert not list((folder / "runs").glob("*/*"))


def test_illegal_layout_is_refused_with_numbers(folder, preloaded_cli):
    done = preloaded_cli("run", "tiny_llama3", "trainer.strategy.pipeline_model_parallel_size=4", cwd=folder)
    assert done.returncode == 2
    assert "tp 2 x pp 4 x cp 1 = 8 must divide the number of GPUs, which is 2" in done.stderr
    assert "Traceback" not in done.stderr
