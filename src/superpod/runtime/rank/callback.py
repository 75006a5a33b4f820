"""The one callback that a run carries: metrics, heartbeats, signals, and the done marker."""

from __future__ import annotations

import math
import os
import resource
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback

from superpod.common import parent_death, post_norms
from superpod.common.files import JsonObject, append_line, tail_lines, write_json
from superpod.common.locks import RANKS, share
from superpod.runtime.attempts import time_limit
from superpod.runtime.checkpoints.saved_checkpoints import SavedCheckpoints, wait_s
from superpod.runtime.heartbeat.heartbeat import Heartbeat
from superpod.runtime.rank import optimizer_resume, rank_monitor
from superpod.runtime.rank.capture import capture_output
from superpod.runtime.rank.stopping import Deadline, StopSignals, save_last
from superpod.runtime.runs.run_folder import Attempt
from superpod.runtime.runs.run_state import DONE

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import Trainer

GIB = 2**30


class RunError(RuntimeError):
    """Training must not go on: the loss is not a number, or the run folder cannot be written."""


class RunCallback(Callback):
    """Writes a run's files (docs/runs.md) from inside the job.

    Rank 0 writes `metrics.jsonl`: NeMo's strategy sends the loss of the last pipeline stage to it, and averages the
    validation loss over the stages. Every rank leaves its step and phase (start, train, validate, save, saved, stopped,
    done, ended, failed) in its node's memory; one of them writes them all into `heartbeat/nodes` every `heartbeat_s`
    seconds (default: what the limit of a stall needs).

    `monitored` starts the rank monitor that the FaultToleranceCallback of nvidia-resiliency-ext reports to.
    `run_dir` and `attempt` ("003") say where; an empty one is taken from SUPERPOD_RUN_DIR or SUPERPOD_ATTEMPT, so that
    a requeued job can open a new attempt with the same recipe file. Raises RunError (see there) out of the training.
    """

    def __init__(
        self, run_dir: str = "", attempt: str = "", heartbeat_s: float | None = None, monitored: bool = False
    ) -> None:
        super().__init__()
        self.run_dir = run_dir or os.environ.get("SUPERPOD_RUN_DIR", "")
        self.attempt = attempt or os.environ.get("SUPERPOD_ATTEMPT", "")
        self.heartbeat_s = heartbeat_s
        self._signals = StopSignals()
        self._line: JsonObject = {}
        self._beat: Heartbeat | None = None
        self._deadline = Deadline.from_environ(os.environ)
        self._save_began = 0.0
        self._step_began = 0.0
        self._stopped_by = 0
        self._checkpoints: SavedCheckpoints | None = None
        """in the first rank of a node, from the start of the training on"""
        self._held: int | None = None
        """the shared lock on RUN/.ranks, for as long as this process lives"""
        capture_output(self._attempt_dir)
        if "RANK" in os.environ:
            parent_death.kill_children_with_this_process()
        if monitored:
            rank_monitor.start(self._run)

    @property
    def _run(self) -> Path:
        return Path(self.run_dir)

    @property
    def _attempt_dir(self) -> Path:
        return self._run / "attempts" / self.attempt

    # -- hooks, in the order of a training ---------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: object, stage: str) -> None:
        """Make the heartbeat folder, and take up the last line that an earlier attempt wrote."""
        self._signals.remember()
        optimizer_resume.prepare(trainer.strategy)
        (self._attempt_dir / "heartbeat").mkdir(parents=True, exist_ok=True)
        if int(os.environ.get("LOCAL_RANK", "0")) == 0 and self._held is None:
            self._held = share(self._run / RANKS)  # no second attempt while ranks of a killed launcher live on
        self._heartbeat(trainer, "start")

    def on_train_start(self, trainer: Trainer, pl_module: torch.nn.Module) -> None:
        """Take over the signals: from here on a checkpoint can be saved."""
        post_norms.set_epsilon(getattr(trainer.strategy, "megatron_parallel", pl_module))  # of all virtual stages
        self._signals.install()
        self._require_resumed(trainer)
        _count_the_saved_batch(trainer)
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            nodes = trainer.world_size // size
            self._checkpoints = SavedCheckpoints(self._run, trainer.global_rank, size, nodes)
            self._checkpoints.watch(trainer)
        if trainer.is_global_zero:
            lines = [
                line for line in tail_lines(self._run / "metrics.jsonl") if line.get("step") == trainer.global_step
            ]
            self._line = lines[-1] if lines else {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: object, batch: object, batch_idx: int) -> None:
        """Start the clock of the step."""
        self._saved(trainer)
        if self._checkpoints:
            self._checkpoints.collect(trainer)
        self._heartbeat(trainer, "train")
        self._step_began = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: object, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Write the step's line; stop here, with a checkpoint, when any rank got a signal."""
        metrics = trainer.callback_metrics  # read on every rank: computing a metric may be a collective
        if trainer.is_global_zero and trainer.global_step != self._line.get("step"):
            self._write_step(trainer, metrics)
        if self._deadline.is_near(time.monotonic() - self._step_began):
            self._signals.note(signal.SIGUSR1)
        number = self._signals.on_any_rank()
        if number and not self._stopped_by:
            self._stop(trainer, number)

    def on_validation_start(self, trainer: Trainer, pl_module: object) -> None:
        """Note that the rank validates."""
        self._saved(trainer)
        self._heartbeat(trainer, "validate")

    def on_validation_end(self, trainer: Trainer, pl_module: object) -> None:
        """Write the line of this step again, with its validation loss (nats per token)."""
        value = _metric_value(trainer.callback_metrics.get("val_loss"))
        if trainer.sanity_checking or not trainer.is_global_zero or value is None:
            return
        step = trainer.global_step
        line = self._line if self._line.get("step") == step else {"step": step}
        self._append({"attempt": self.attempt, **line, "t": time.time(), "val_loss": value})

    def on_save_checkpoint(self, trainer: Trainer, pl_module: object, checkpoint: dict[str, object]) -> None:
        """Note that the rank saves: a long silence is no stall then. Raises RunError when another attempt has begun."""
        newest = max((p.name for p in (self._run / "attempts").glob("*") if p.name.isdecimal()), default=self.attempt)
        if int(newest) > int(self.attempt or 0):
            raise RunError(f"attempt {newest} has taken this run over; attempt {self.attempt} ends without saving")
        self._save_began = time.monotonic()
        self._heartbeat(trainer, "save")

    def on_fit_end(self, trainer: Trainer, pl_module: object) -> None:
        """Write the done marker if the last step is reached; only here is the last checkpoint surely saved."""
        self._signals.restore()  # not before: a signal must not break into the last save
        early = early_stop(trainer)
        finished = not self._stopped_by and (bool(early) or trainer.global_step >= max(trainer.max_steps, 0))
        if finished and trainer.is_global_zero:
            marker = {"t": time.time(), "attempt": self.attempt, "step": trainer.global_step}
            write_json(self._run / DONE, marker | ({"early": early} if early else {}))
        if self._stopped_by:
            self._heartbeat(trainer, "stopped", signal=signal.Signals(self._stopped_by).name)
        else:
            self._heartbeat(trainer, "done" if finished else "ended")
        if self._beat:
            self._beat.end()
        if self._checkpoints:
            # Last: what is saved is saved, and only its manifest may be cut short.
            self._checkpoints.end(trainer, wait_s=wait_s(self._stopped_by, self._time_limit(), time.time()))

    def on_exception(self, trainer: Trainer, pl_module: object, exception: BaseException) -> None:
        """Write the exception into the heartbeat."""
        self._signals.restore()
        self._heartbeat(trainer, "failed", error=f"{type(exception).__name__}: {exception}"[:2000])
        if self._beat:
            self._beat.end()

    def _time_limit(self) -> float:
        """Unix time of the job's limit as its first node has last read it from Slurm; 0 = none."""
        at = time_limit.read(self._attempt_dir)
        return float(os.environ.get("SUPERPOD_DEADLINE") or 0) if at is None else at

    def _require_resumed(self, trainer: Trainer) -> None:
        """Raise RunError where the training would begin before the checkpoint that this attempt resumes from."""
        step = Attempt(self._attempt_dir).resume.get("step") if trainer.is_global_zero else None
        if isinstance(step, int) and trainer.global_step < step:
            raise RunError(
                f"the training begins at step {trainer.global_step}, but this attempt resumes from step {step}: NeMo "
                f"has not loaded {self._attempt_dir / 'resume'}; look at resume and log.ckpt of the recipe"
            )

    # -- the parts ---------------------------------------------------------------------------------------------------

    def _write_step(self, trainer: Trainer, metrics: Mapping[str, object]) -> None:
        loss = _metric_value(metrics.get("reduced_train_loss"))
        seconds = time.monotonic() - self._step_began  # reading the loss has waited for the GPU
        tokens = _tokens_per_step(trainer)
        # Without a line to count on from (metrics.jsonl is gone), every earlier step had as many tokens.
        before = self._line.get("tokens") or (tokens or 0) * (trainer.global_step - 1)
        self._append(
            {
                "t": time.time(),
                "attempt": self.attempt,
                "step": trainer.global_step,
                "loss": loss,
                "val_loss": None,
                "lr": _metric_value(metrics.get("lr")),
                "grad_norm": _metric_value(metrics.get("grad_norm")),
                "step_time_s": round(seconds, 6),
                "tokens": before + tokens if tokens else None,
                "tokens_per_s_per_gpu": tokens / seconds / trainer.world_size if tokens else None,
                **memory_gib(),
            }
        )
        if loss is not None and not math.isfinite(loss):
            raise RunError(
                f"the loss is {loss} at step {trainer.global_step}; stopped here. Resume from the last checkpoint "
                "with a lower learning rate, or past the data that this step read"
            )

    def _append(self, line: JsonObject) -> None:
        self._line = line
        path = self._run / "metrics.jsonl"
        try:
            append_line(path, {key: _json_number(value) for key, value in line.items()})
        except OSError as error:
            raise RunError(
                f"cannot write {path}: {error.strerror}; the training stops at step {line['step']} rather than go on "
                "unrecorded. Make room, then resume from the last checkpoint"
            ) from error

    def _stop(self, trainer: Trainer, number: int) -> None:
        self._stopped_by = number
        print(f"got {signal.Signals(number).name}: saving and stopping after step {trainer.global_step}", flush=True)
        saved = save_last(trainer)
        self._saved(trainer)
        self._heartbeat(trainer, "stopped", signal=signal.Signals(number).name, checkpoint=saved)
        trainer.limit_val_batches = 0  # else Lightning validates before it stops, and the grace time runs out
        trainer.should_stop = True

    def _saved(self, trainer: Trainer) -> None:
        """After a save, note how long it took: later attempts and this one's time limit leave room for it."""
        if self._save_began:
            seconds = time.monotonic() - self._save_began
            self._save_began = 0.0
            self._deadline.save_took(seconds)
            self._heartbeat(trainer, "saved", save_s=round(seconds, 3))

    def _heartbeat(self, trainer: Trainer, phase: str, save_s: float = 0.0, **facts: object) -> None:
        if self._beat is None:
            self._beat = Heartbeat(self._attempt_dir / "heartbeat", trainer.global_rank, self.heartbeat_s)
            self._beat.begin()
        self._beat.beat(trainer.global_step, phase, save_s, **memory_gib(), **facts)


def early_stop(trainer: Trainer) -> str:
    """Why Lightning's EarlyStopping has ended the training before its last step, in words; '' where it has not."""
    for callback in trainer.early_stopping_callbacks:
        if callback.wait_count >= callback.patience:
            best, delta = float(callback.best_score), abs(callback.min_delta)
            than = f" by more than {delta:g}" if delta else ""
            return f"{callback.monitor} has not fallen{than} in {callback.patience} validations; its best is {best:.4f}"
    return ""


def _count_the_saved_batch(trainer: Trainer) -> None:
    """Correct Lightning's batch count on resume: it saves before it counts, so validation would come a step late."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    behind = trainer.global_step - progress.current.completed
    if trainer.fit_loop.epoch_loop.restarting and behind == 1:
        for counter in (progress.current, progress.total):
            for name in ("ready", "started", "processed", "completed"):
                setattr(counter, name, trainer.global_step)


def memory_gib() -> dict[str, float]:
    """Peak memory of this rank in GiB: the CUDA allocator's, or the process's resident set where there is no GPU."""
    import torch

    if torch.version.cuda and torch.cuda.device_count():
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    else:
        allocated = reserved = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"allocated_gib": round(allocated / GIB, 4), "reserved_gib": round(reserved / GIB, 4)}


def _tokens_per_step(trainer: Trainer) -> int | None:
    """Tokens of one step over all ranks, padding included, from NeMo's data sampler; None without one."""
    data = getattr(trainer, "datamodule", None)  # Lightning sets it in fit()
    sampler = getattr(data, "data_sampler", None)
    if sampler is None:
        return None
    samples = sampler.current_global_batch_size if sampler.rampup_batch_size else sampler.global_batch_size
    return int(samples) * int(sampler.seq_len)


def _metric_value(value: Any) -> float | None:
    """A metric (tensor or number) as a float."""
    return None if value is None else float(value)


def _json_number(value: object) -> object:
    """None in place of NaN and infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
