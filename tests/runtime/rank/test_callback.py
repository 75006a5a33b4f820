"""The callback in a real Lightning training: a toy model that logs under the names that NeMo's strategy uses."""

import json
import math
import os
import signal
import subprocess
import sys
import time
import warnings
from types import SimpleNamespace

import pytest

from superpod.common.json_files import read_lines
from superpod.runtime.rank.capture import capture_output
from superpod.runtime.runs.run_folder import RunFolder

pytestmark = [pytest.mark.nemo, pytest.mark.filterwarnings("ignore:::lightning")]

pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning.pytorch")
import torch  # noqa: E402

from superpod.runtime import RunCallback, RunError  # noqa: E402
from superpod.runtime.checkpoints.saved_checkpoints import END_S, GRACE_S, SavedCheckpoints  # noqa: E402
from superpod.runtime.heartbeat.heartbeat import Heartbeat  # noqa: E402

FIELDS = {
    "t", "attempt", "step", "loss", "val_loss", "lr", "grad_norm", "step_time_s", "tokens", "tokens_per_s_per_gpu",
    "allocated_gib", "reserved_gib",
}  # fmt: skip


class Toy(lightning.LightningModule):
    """Logs what NeMo logs, where NeMo logs it; `losses` are the losses of the steps to come, None a real one."""

    def __init__(self, loss_at=None, at_step=None):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.loss_at, self.at_step = loss_at or {}, at_step

    def on_train_batch_start(self, batch, batch_idx):
        self.log("lr", 0.5 / (1 + self.trainer.global_step))

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        step = self.trainer.global_step + 1
        if self.at_step:
            self.at_step(step, self)
        self.log("reduced_train_loss", self.loss_at.get(step, loss.detach()), prog_bar=True, batch_size=1)
        self.log("grad_norm", 0.25 * step, batch_size=1)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 10.0 + self.trainer.global_step + batch_idx, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Data(lightning.LightningDataModule):
    data_sampler = SimpleNamespace(seq_len=128, global_batch_size=8, rampup_batch_size=None)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(128, 4)), batch_size=2)

    val_dataloader = train_dataloader


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "runs", "tiny_pretrain_h100_bf16", facts={}, recipe_lines=[])


def fit(run, attempt, toy=None, *, max_steps=4, val_every=2, resume=None, data=True, callback=None):
    checkpoint = lightning.callbacks.ModelCheckpoint(
        dirpath=run.checkpoints, every_n_train_steps=100, save_last=True, save_top_k=0
    )
    callback = callback or RunCallback(run_dir=str(run.path), attempt=attempt.name)
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=max_steps, val_check_interval=val_every, limit_val_batches=2, logger=False,
        num_sanity_val_steps=1, enable_progress_bar=False, enable_model_summary=False, callbacks=[callback, checkpoint],
    )  # fmt: skip
    data = {"datamodule": Data()} if data else {"train_dataloaders": Data().train_dataloader()}
    trainer.fit(toy or Toy(), ckpt_path=resume, **data)
    return trainer


def test_a_training_writes_the_lines_of_the_contract(run):
    fit(run, run.new_attempt())
    lines = run.metrics()
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(set(line) == FIELDS for line in lines)
    assert [line["attempt"] for line in lines] == ["001"] * 4
    assert [line["lr"] for line in lines] == pytest.approx([0.5, 0.25, 0.5 / 3, 0.125])
    assert [line["grad_norm"] for line in lines] == [0.25, 0.5, 0.75, 1.0]
    assert [line["tokens"] for line in lines] == [1024, 2048, 3072, 4096]
    assert all(line["tokens_per_s_per_gpu"] == pytest.approx(1024 / line["step_time_s"], rel=0.01) for line in lines)
    assert all(0.1 < line["allocated_gib"] < 100 for line in lines)
    assert all(line["loss"] >= 0 for line in lines)


def test_the_validation_loss_goes_to_the_step_where_it_ran(run):
    fit(run, run.new_attempt())
    assert [line["val_loss"] for line in run.metrics()] == [None, 12.5, None, 14.5]
    raw = [(line["step"], line["val_loss"]) for line in read_lines(run.path / "metrics.jsonl")]
    assert raw == [(1, None), (2, None), (2, 12.5), (3, None), (4, None), (4, 14.5)]


class Projection(torch.nn.Linear):
    """With a norm behind it, as NeMo's class for Gemma 2 has it (gemma2.py, TERowParallelLinearLayerNorm)."""

    def __init__(self, eps):
        super().__init__(4, 4)
        self.config = SimpleNamespace(layernorm_epsilon=eps)
        self.post_layernorm, self.other = torch.nn.RMSNorm(4, eps=1e-5), torch.nn.RMSNorm(4, eps=1e-5)


def test_a_norm_behind_a_projection_trains_with_the_epsilon_of_the_configuration(run):
    epsilons = []
    toy = Toy(at_step=lambda _, toy: epsilons.append([norm.eps for norm in toy.modules() if hasattr(norm, "eps")]))
    toy.layers = torch.nn.Sequential(Projection(1e-6), torch.nn.Sequential(Projection(1e-3)))
    fit(run, run.new_attempt(), toy, max_steps=2)
    assert epsilons == [[1e-6, 1e-5, 1e-3, 1e-5]] * 2


def test_done_is_marked_at_the_last_step_only(run):
    fit(run, run.new_attempt(), max_steps=3)
    assert run.state() == "done"
    assert json.loads((run.path / "done").read_text())["step"] == 3


def test_no_marker_when_the_last_checkpoint_cannot_be_saved(run, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lightning.callbacks.ModelCheckpoint, "on_train_end", full)
    attempt = run.new_attempt()
    with pytest.raises(OSError, match="No space left"):
        fit(run, attempt)
    assert not run.done
    assert attempt.heartbeat()["phase"] == "failed"


@pytest.fixture
def beats(monkeypatch):
    """Every beat of the run, as it is at its rank: the file has the newest only."""
    made = []
    real = Heartbeat.beat

    def beat(self, step, phase, save_s=0.0, **facts):
        made.append({"step": step, "phase": phase, "save_s": save_s, **facts})
        real(self, step, phase, save_s, **facts)

    monkeypatch.setattr(Heartbeat, "beat", beat)
    return made


def test_heartbeats_tell_the_phases_and_the_file_has_the_newest(run, beats):
    attempt = run.new_attempt()
    fit(run, attempt, Toy(at_step=lambda step, toy: time.sleep(0.02)), max_steps=40, val_every=20)
    phases = [beat["phase"] for beat in beats]
    assert phases[0] == "start"
    assert phases[-1] == "done"
    assert set(phases) == {"start", "validate", "train", "save", "saved", "done"}
    assert [beat["save_s"] > 0 for beat in beats] == [phase == "saved" for phase in phases]
    last = attempt.heartbeat()
    assert {"t", "moved", "host", "allocated_gib"} <= set(last)
    assert (last["step"], last["phase"]) == (40, "done")
    assert last["save_s"] == max(beat["save_s"] for beat in beats)
    assert [path.name for path in (attempt.path / "heartbeat").iterdir()] == ["nodes"]


@pytest.mark.parametrize("stops", [True, False])
def test_a_stopped_training_does_not_use_up_its_grace_for_a_manifest(run, monkeypatch, stops):
    waits = []
    monkeypatch.setattr(SavedCheckpoints, "end", lambda self, trainer, *, wait_s: waits.append(wait_s))
    stop = Toy(at_step=lambda step, toy: stops and step == 2 and signal.raise_signal(signal.SIGTERM))
    fit(run, run.new_attempt(), stop)
    assert waits == [GRACE_S if stops else END_S]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_finishes_the_step_saves_and_stops(run, beats, number):
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    attempt = run.new_attempt()
    fit(
        run,
        attempt,
        Toy(at_step=lambda step, toy: step == 3 and signal.raise_signal(number)),
        max_steps=50,
        val_every=3,
    )
    assert [line["step"] for line in run.metrics()] == [1, 2, 3]
    assert not run.done
    saved = torch.load(run.checkpoints / "last.ckpt", weights_only=False)
    assert saved["global_step"] == 3
    assert "save" in [beat["phase"] for beat in beats]
    assert "validate" not in [beat["phase"] for beat in beats if beat["step"] == 3]
    last = attempt.heartbeat()
    assert last | {"phase": "stopped", "signal": number.name, "checkpoint": True} == last
    assert {n: signal.getsignal(n) for n in before} == before


def test_a_signal_during_the_last_save_does_not_break_it(run, monkeypatch):
    monkeypatch.setattr(
        lightning.callbacks.ModelCheckpoint,
        "on_train_end",
        lambda *args: signal.raise_signal(signal.SIGINT),
        raising=False,
    )
    fit(run, run.new_attempt())
    assert run.done


def test_a_stopped_run_goes_on_where_it_was(run):
    stopper = Toy(at_step=lambda step, toy: step == 3 and signal.raise_signal(signal.SIGTERM))
    fit(run, run.new_attempt(), stopper, max_steps=6, val_every=5)
    fit(run, run.new_attempt(), max_steps=6, val_every=5, resume=run.checkpoints / "last.ckpt")
    lines = run.metrics()
    assert [(line["step"], line["attempt"]) for line in lines] == [(n, "001" if n < 4 else "002") for n in range(1, 7)]
    assert [line["tokens"] for line in lines] == [1024 * n for n in range(1, 7)]
    assert lines[2]["loss"] is not None
    assert run.done


def test_steps_done_again_after_a_kill_replace_the_lost_ones(run):
    fit(run, run.new_attempt(), max_steps=2, val_every=2)
    (run.path / "done").unlink()
    metrics = run.path / "metrics.jsonl"
    lost = [{"attempt": "001", "step": step, "loss": 99.0, "tokens": 5 * step} for step in (3, 4)]
    metrics.write_text(metrics.read_text() + "".join(json.dumps(line) + "\n" for line in lost) + '{"step": 5, "lo')
    fit(run, run.new_attempt(), max_steps=3, val_every=2, resume=run.checkpoints / "last.ckpt")
    lines = {line["step"]: line for line in run.metrics()}
    assert sorted(lines) == [1, 2, 3, 4]
    assert lines[2]["loss"] is not None
    assert lines[3]["attempt"] == "002"
    assert lines[3]["tokens"] == 3 * 1024


def test_a_loss_that_is_no_number_ends_the_training(run):
    attempt = run.new_attempt()
    with pytest.raises(RunError, match=r"the loss is nan at step 3.*lower learning rate"):
        fit(run, attempt, Toy(loss_at={3: math.nan}))
    assert run.metrics()[-1]["step"] == 3
    assert run.metrics()[-1]["loss"] is None
    assert attempt.heartbeat()["phase"] == "failed"
    assert "the loss is nan" in attempt.heartbeat()["error"]
    assert not run.done


def test_metrics_that_cannot_be_written_end_the_training(run):
    (run.path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"cannot write .*metrics.jsonl: No space left on device.* stops at step 1"):
        fit(run, run.new_attempt())
    assert not run.done


def test_heartbeats_that_cannot_be_written_do_not(run):
    attempt = run.new_attempt()
    (attempt.path / "heartbeat" / "nodes").symlink_to("/dev/full")
    fit(run, attempt)
    assert run.done


def test_without_a_data_sampler_tokens_are_unknown(run):
    fit(run, run.new_attempt(), data=False, max_steps=2)
    assert [line["tokens"] for line in run.metrics()] == [None, None]
    assert [line["tokens_per_s_per_gpu"] for line in run.metrics()] == [None, None]


def test_the_folder_may_come_from_the_environment(run, monkeypatch):
    attempt = run.new_attempt()
    monkeypatch.setenv("SUPERPOD_RUN_DIR", str(run.path))
    monkeypatch.setenv("SUPERPOD_ATTEMPT", attempt.name)
    fit(run, attempt, callback=RunCallback())
    assert run.done


def test_capture_does_nothing_outside_a_rank(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert capture_output(tmp_path) is None
    monkeypatch.setenv("RANK", "0")
    assert capture_output(tmp_path / "none") is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"RANK": "5", "GROUP_RANK": "1"}, "1.5.log"),
        ({"RANK": "5", "SLURM_NODEID": "2"}, "2.5.log"),
        ({"RANK": "0"}, "0.0.log"),
    ],
)
def test_capture_takes_the_output_of_the_rank_and_its_children(tmp_path, environ, name):
    code = f"""
import os, subprocess, sys
from superpod.runtime.rank.capture import capture_output
print("before", flush=True)
capture_output({str(tmp_path)!r}); capture_output({str(tmp_path)!r})
print("out"); print("err", file=sys.stderr); os.write(1, b"raw\\n")
subprocess.run(["echo", "child"])
os._exit(3)"""
    plain = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "GROUP_RANK", "SLURM_NODEID", "SUPERPOD_CAPTURED")
    }
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=plain | environ)
    assert (done.returncode, done.stdout, done.stderr) == (3, "before\n", "")
    assert [p.name for p in (tmp_path / "logs").iterdir()] == [name]
    assert (tmp_path / "logs" / name).read_text() == "out\nerr\nraw\nchild\n"


RANK = """
import sys, warnings; warnings.simplefilter("ignore")
import os, signal, time, torch, torch.distributed as dist
from superpod.runtime.rank.stopping import StopSignals
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
signals = StopSignals(); signals.install()
for step in range(1, 1000):
    time.sleep(0.01)
    if step == 5 and rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    if number := signals.received_by_any_rank():
        print("stopped at", step, "by", number, flush=True)
        break
dist.destroy_process_group()
"""


def test_one_rank_s_signal_stops_all_at_the_same_step(tmp_path):
    commands = [[sys.executable, "-c", RANK, str(rank), str(tmp_path / "meeting")] for rank in range(2)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) for c in commands]
    try:
        ended = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [out for out, _ in ended] == ["stopped at 5 by 15\n"] * 2, ended


def test_a_training_that_would_begin_before_the_checkpoint_of_its_attempt_is_ended(run):
    """NeMo says "Training from scratch", and the run is at step 1, whatever had been trained before."""
    attempt = run.new_attempt()
    attempt.mark("running", resume={"step": 30})
    with pytest.raises(RunError, match="starts at step 0, but this attempt resumes from step 30"):
        fit(run, attempt)
    assert run.metrics() == []


def test_a_completed_save_is_noted_and_gets_its_manifest(run):
    """With a folder as NeMo's strategy makes one, where Lightning's own would write a file."""
    from superpod.runtime.checkpoints import manifest, resume
    from tests.reports.runs import checkpoint_files

    folder = run.checkpoints / "step=1-last"

    def save(step, toy):
        if step == 2:
            checkpoint_files.write(folder)
            toy.trainer.strategy.save_checkpoint = lambda *_, **__: None
            toy.trainer.save_checkpoint(f"{folder}.ckpt")

    fit(run, run.new_attempt(), Toy(at_step=save))
    assert {"checkpoint": "step=1-last", "step": 2}.items() <= read_lines(run.path / resume.SAVED)[0].items()
    files = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    own = {name for name in files if not name.startswith("manifest/") and "__1_" not in name}
    assert set(manifest.read(folder).records) == own, "but what another node's rank has written"
