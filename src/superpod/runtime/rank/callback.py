"""Provide the Lightning callback of a run, which writes metrics, heartbeats and the done marker and handles signals."""

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

from superpod.common import parent_death
from superpod.common.json_files import JsonObject, append_line, json_number, tail_lines, write_json
from superpod.common.locks import RANKS, acquire_shared
from superpod.runtime.attempts import time_limit
from superpod.runtime.checkpoints.saved_checkpoints import SavedCheckpoints, wait_s
from superpod.runtime.heartbeat.heartbeat import Heartbeat
from superpod.runtime.rank import optimizer_resume, post_norms, rank_monitor
from superpod.runtime.rank.capture import capture_output
from superpod.runtime.rank.stopping import Deadline, StopSignals, save_last
from superpod.runtime.runs.run_folder import Attempt
from superpod.runtime.runs.run_state import DONE

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import Trainer

GIB = 2**30


class RunError(RuntimeError):
    """The training must not continue, for example since the loss is not finite or the run folder cannot be written."""


class RunCallback(Callback):
    """Writes the files of a run (docs/runs.md) from inside the job. Its hooks may raise RunError.

    Rank 0 writes `metrics.jsonl`: NeMo's strategy sends it the loss of the last pipeline stage, and averages the
    validation loss over the stages. Every rank stores its step and phase (start, train, validate, save, saved, stopped,
    done, ended, failed) in shared memory on its node, and one rank per node writes these to `heartbeat/nodes`.

    Args:
        run_dir: the run folder; "" = the value of SUPERPOD_RUN_DIR.
        attempt: the name of the attempt, such as "003"; "" = the value of SUPERPOD_ATTEMPT, so that a requeued job can
            use the same recipe file for a new attempt.
        heartbeat_s: seconds between two writes of heartbeats; None = from the stall timeout.
        monitored: whether to start the rank monitor that the FaultToleranceCallback of nvidia-resiliency-ext needs.
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
        """number of the signal because of which the training stops; 0 = none"""
        self._checkpoints: SavedCheckpoints | None = None
        """None on ranks other than the first of a node, and before training starts"""
        self._held: int | None = None
        """the shared lock on RUN/.ranks, held until this process exits"""
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

    # -- hooks, in the order of their calls --------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: object, stage: str) -> None:
        """Create the heartbeat folder, acquire the lock of the ranks, and send the first heartbeat."""
        self._signals.remember()
        optimizer_resume.prepare(trainer.strategy)
        (self._attempt_dir / "heartbeat").mkdir(parents=True, exist_ok=True)
        if int(os.environ.get("LOCAL_RANK", "0")) == 0 and self._held is None:
            # The lock prevents another attempt while ranks of a killed launcher are running.
            self._held = acquire_shared(self._run / RANKS)
        self._heartbeat(trainer, "start")

    def on_train_start(self, trainer: Trainer, pl_module: torch.nn.Module) -> None:
        """Install the signal handlers, since checkpoints can be saved from now on, and check the first step."""
        post_norms.set_epsilon(getattr(trainer.strategy, "megatron_parallel", pl_module))  # of all virtual stages
        self._signals.install()
        self._require_resumed(trainer)
        _correct_batch_count(trainer)
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            nodes = trainer.world_size // size
            self._checkpoints = SavedCheckpoints(self._run, trainer.global_rank, size, nodes)
            self._checkpoints.watch(trainer)

        if trainer.is_global_zero:
            # Start from an earlier attempt's line of this step, to continue its count of tokens.
            for line in tail_lines(self._run / "metrics.jsonl"):
                if line.get("step") == trainer.global_step:
                    self._line = line

    def on_train_batch_start(self, trainer: Trainer, pl_module: object, batch: object, batch_idx: int) -> None:
        """Send a heartbeat at the start of a step, and pass complete checkpoints to the thread that records them."""
        self._end_save(trainer)
        if self._checkpoints:
            self._checkpoints.collect(trainer)
        self._heartbeat(trainer, "train")
        self._step_began = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: object, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Write the metrics of the step. If a rank has received a signal, save and stop."""
        metrics = trainer.callback_metrics  # read on every rank, since computing a metric may be a collective
        if trainer.is_global_zero and trainer.global_step != self._line.get("step"):
            self._write_step(trainer, metrics)
        if self._deadline.is_near(time.monotonic() - self._step_began):
            self._signals.record(signal.SIGUSR1)
        number = self._signals.received_by_any_rank()
        if number and not self._stopped_by:
            self._stop(trainer, number)

    def on_validation_start(self, trainer: Trainer, pl_module: object) -> None:
        """Send a heartbeat with the phase `validate`."""
        self._end_save(trainer)
        self._heartbeat(trainer, "validate")

    def on_validation_end(self, trainer: Trainer, pl_module: object) -> None:
        """Add a line with the validation loss (nats per token) of this step to metrics.jsonl."""
        value = _metric_value(trainer.callback_metrics.get("val_loss"))
        if trainer.sanity_checking or not trainer.is_global_zero or value is None:
            return
        step = trainer.global_step
        line = self._line if self._line.get("step") == step else {"step": step}
        self._append({"attempt": self.attempt, **line, "t": time.time(), "val_loss": value})

    def on_save_checkpoint(self, trainer: Trainer, pl_module: object, checkpoint: dict[str, object]) -> None:
        """Send a heartbeat with the phase `save`, whose stall timeout is longer.

        Raises RunError if a newer attempt of the run has started.
        """
        names = [path.name for path in (self._run / "attempts").glob("*") if path.name.isdecimal()]
        newest = max(names, key=int, default=self.attempt)
        if int(newest) > int(self.attempt or 0):
            raise RunError(f"attempt {newest} has taken over this run; attempt {self.attempt} ends without saving")
        self._save_began = time.monotonic()
        self._heartbeat(trainer, "save")

    def on_fit_end(self, trainer: Trainer, pl_module: object) -> None:
        """Write the done marker if the last step is trained. At this point, the last checkpoint is saved."""
        self._signals.restore()  # not earlier, since a signal must not interrupt the last save
        stop_message = early_stop(trainer)
        is_finished = not self._stopped_by and (bool(stop_message) or trainer.global_step >= max(trainer.max_steps, 0))
        if is_finished and trainer.is_global_zero:
            marker = {"t": time.time(), "attempt": self.attempt, "step": trainer.global_step}
            if stop_message:
                marker["early"] = stop_message
            write_json(self._run / DONE, marker)
        if self._stopped_by:
            self._heartbeat(trainer, "stopped", signal=signal.Signals(self._stopped_by).name)
        else:
            self._heartbeat(trainer, "done" if is_finished else "ended")
        if self._beat:
            self._beat.end()
        if self._checkpoints:
            # Last, since the checkpoint is complete and only its manifest may be lost.
            self._checkpoints.end(trainer, wait_s=wait_s(self._stopped_by, self._time_limit(), time.time()))

    def on_exception(self, trainer: Trainer, pl_module: object, exception: BaseException) -> None:
        """Send a heartbeat with the phase `failed` and the exception."""
        self._signals.restore()
        self._heartbeat(trainer, "failed", error=f"{type(exception).__name__}: {exception}"[:2000])
        if self._beat:
            self._beat.end()

    def _time_limit(self) -> float:
        """Return the Unix time at which the job ends, as the first node last read it from Slurm; 0 = no limit."""
        end_time = time_limit.read(self._attempt_dir)
        return float(os.environ.get("SUPERPOD_DEADLINE") or 0) if end_time is None else end_time

    def _require_resumed(self, trainer: Trainer) -> None:
        """Raise RunError if training starts at an earlier step than the checkpoint selected for this attempt."""
        step = Attempt(self._attempt_dir).resume.get("step") if trainer.is_global_zero else None
        if isinstance(step, int) and trainer.global_step < step:
            raise RunError(
                f"training starts at step {trainer.global_step}, but this attempt resumes from step {step}: NeMo did "
                f"not load {self._attempt_dir / 'resume'}; check `resume` and `log.ckpt` in the recipe"
            )

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _write_step(self, trainer: Trainer, metrics: Mapping[str, object]) -> None:
        loss = _metric_value(metrics.get("reduced_train_loss"))
        seconds = time.monotonic() - self._step_began  # correct, since reading the loss has waited for the GPU
        tokens = _tokens_per_step(trainer)
        # Without an earlier line (metrics.jsonl was removed), assume the same number of tokens in all earlier steps.
        tokens_before = self._line.get("tokens") or (tokens or 0) * (trainer.global_step - 1)
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
                "tokens": tokens_before + tokens if tokens else None,
                "tokens_per_s_per_gpu": tokens / seconds / trainer.world_size if tokens else None,
                **memory_gib(),
            }
        )
        # After the write, so that metrics.jsonl contains the step with the non-finite loss.
        if loss is not None and not math.isfinite(loss):
            raise RunError(
                f"the loss is {loss} at step {trainer.global_step}, so the training stops. Resume from the last "
                "checkpoint with a lower learning rate, or skip the data of this step"
            )

    def _append(self, line: JsonObject) -> None:
        self._line = line
        path = self._run / "metrics.jsonl"
        try:
            append_line(path, {key: json_number(value) for key, value in line.items()})
        except OSError as error:
            raise RunError(
                f"cannot write {path}: {error.strerror}, so the training stops at step {line['step']}. Free up space, "
                "then resume from the last checkpoint"
            ) from error

    def _stop(self, trainer: Trainer, number: int) -> None:
        """Save a checkpoint and stop the training after this step because of the signal `number`."""
        self._stopped_by = number
        print(
            f"received {signal.Signals(number).name}: saving and stopping after step {trainer.global_step}", flush=True
        )
        saved_checkpoint = save_last(trainer)
        self._end_save(trainer)
        self._heartbeat(trainer, "stopped", signal=signal.Signals(number).name, checkpoint=saved_checkpoint)
        trainer.limit_val_batches = 0  # otherwise Lightning validates before it stops, which may exceed the grace time
        trainer.should_stop = True

    def _end_save(self, trainer: Trainer) -> None:
        """Record the duration of a finished save, so that this and later attempts reserve as much before the limit."""
        if self._save_began:
            seconds = time.monotonic() - self._save_began
            self._save_began = 0.0
            self._deadline.record_save(seconds)
            self._heartbeat(trainer, "saved", save_s=round(seconds, 3))

    def _heartbeat(self, trainer: Trainer, phase: str, save_s: float = 0.0, **facts: object) -> None:
        if self._beat is None:
            self._beat = Heartbeat(self._attempt_dir / "heartbeat", trainer.global_rank, self.heartbeat_s)
            self._beat.begin()
        self._beat.beat(trainer.global_step, phase, save_s, **memory_gib(), **facts)


def early_stop(trainer: Trainer) -> str:
    """Return the reason why Lightning's EarlyStopping ended the training; '' if it did not."""
    for callback in trainer.early_stopping_callbacks:
        if callback.wait_count >= callback.patience:
            best, delta = float(callback.best_score), abs(callback.min_delta)
            amount = f" by more than {delta:g}" if delta else ""
            return (
                f"{callback.monitor} has not decreased{amount} in {callback.patience} validations; "
                f"its best value is {best:.4f}"
            )
    return ""


def _correct_batch_count(trainer: Trainer) -> None:
    """Correct Lightning's batch counters after a resume: they were saved before their increment, one step too low."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    steps_behind = trainer.global_step - progress.current.completed
    if trainer.fit_loop.epoch_loop.restarting and steps_behind == 1:
        for counter in (progress.current, progress.total):
            for name in ("ready", "started", "processed", "completed"):
                setattr(counter, name, trainer.global_step)


def memory_gib() -> dict[str, float]:
    """Return the peak memory of this rank in GiB, from the CUDA allocator or, without a GPU, as resident set size."""
    import torch

    if torch.version.cuda and torch.cuda.device_count():
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    else:
        allocated = reserved = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"allocated_gib": round(allocated / GIB, 4), "reserved_gib": round(reserved / GIB, 4)}


def _tokens_per_step(trainer: Trainer) -> int | None:
    """Return the tokens per step of all ranks, including padding, from NeMo's data sampler; None if there is none."""
    data = getattr(trainer, "datamodule", None)  # Lightning sets it in fit()
    sampler = getattr(data, "data_sampler", None)
    if sampler is None:
        return None
    samples = sampler.current_global_batch_size if sampler.rampup_batch_size else sampler.global_batch_size
    return int(samples) * int(sampler.seq_len)


def _metric_value(value: Any) -> float | None:
    """Convert a metric (tensor or number) to a float; None stays None."""
    return None if value is None else float(value)
