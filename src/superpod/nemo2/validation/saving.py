"""What a chain of attempts needs: checkpoints that are saved, kept, found again, and hold the optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from superpod.errors import did_you_mean
from superpod.nemo2.validation.reading import Reader
from superpod.planner.rules.rules import Violation

METRICS = ("step", "epoch", "global_step", "consumed_samples", "reduced_train_loss", "val_loss", "lr", "grad_norm")
"""What NeMo's loop logs, and a checkpoint can be ranked by."""
RISING = ("step", "epoch", "global_step", "consumed_samples")
"""Those of which the largest is the newest."""


def resumes(r: Reader) -> Iterator[Violation]:
    """The next attempt continues where the last one ended (nemo/lightning/resume.py)."""
    if r["resume.resume_if_exists"] is False:
        yield Violation(
            "resume",
            "resume.resume_if_exists is off: every attempt of a run starts at step 0 again, and saves over the last",
            "leave it on; without a checkpoint it changes nothing",
        )
    elif r["resume.resume_ignore_no_checkpoint"] is False and r["resume.restore_config"] is None:
        yield Violation(
            "first_attempt",
            "resume.resume_ignore_no_checkpoint is off: the first attempt finds no checkpoint, and ends",
            "write resume.resume_ignore_no_checkpoint=True",
        )
    if not r["log.ckpt.save_last"] and r["log.ckpt"] is not None:
        yield Violation(
            "save_last",
            f"log.ckpt.save_last is {r['log.ckpt.save_last']!r}, and attempts resume from *-last only: each would "
            "start at step 0",
            "write log.ckpt.save_last=link, or True for a second copy",
        )


def whole(r: Reader) -> Iterator[Violation]:
    """A checkpoint has the optimizer, and an attempt takes it."""
    for path, bad, what in (
        ("log.ckpt.save_weights_only", True, "checkpoints hold no optimizer"),
        ("trainer.strategy.ckpt_save_optimizer", False, "checkpoints hold no optimizer"),
        ("trainer.strategy.ckpt_load_optimizer", False, "attempts leave the optimizer of a checkpoint unread"),
    ):
        if r[path] is bad:
            yield Violation(
                path.rpartition(".")[2],
                f"{path} is {bad}: {what}, and a run that continues starts Adam's moments and its schedule anew",
                f"write {path}={not bad}; `recipes ckpt convert` writes weights alone",
            )


def often(r: Reader) -> Iterator[Violation]:
    """Something is saved before the end."""
    if r["trainer.enable_checkpointing"] is False:  # Lightning: beside a ModelCheckpoint callback it raises
        message = "trainer.enable_checkpointing is off, and the run's checkpoints are a callback"
        yield Violation("checkpointing", message, "leave it on; log.ckpt says how often and how many")
    ways = ("every_n_train_steps", "every_n_epochs", "train_time_interval")
    given = [name for name in ways if r[f"log.ckpt.{name}"]]
    if r["log.ckpt"] is not None and r["log.ckpt.every_n_train_steps"] != 0 and not given:
        steps = r["trainer.max_steps"]
        message = f"log.ckpt saves at no interval: a stop before step {steps} loses everything"
        yield Violation("interval", message, "write log.ckpt.every_n_train_steps=100")
    if len(given) > 1:  # Lightning's ModelCheckpoint
        message = f"log.ckpt has {' and '.join(given)}, and takes one of them"
        yield Violation("intervals", message, f"write log.ckpt.{given[-1]}=None")


def newest(r: Reader) -> Iterator[Violation]:
    """What is kept is the newest or the best, not the oldest or the worst."""
    metric, mode = r["log.ckpt.monitor"], r["log.ckpt.mode"]
    if metric is None:
        return
    if metric in RISING and mode == "min":
        message = f"log.ckpt.monitor is {metric} and its mode is min: the oldest checkpoints stay, the newest go"
        yield Violation("mode", message, "write log.ckpt.mode=max")
    if "loss" in str(metric) and mode == "max":
        message = f"log.ckpt.monitor is {metric} and its mode is max: the worst checkpoints stay"
        yield Violation("mode", message, "write log.ckpt.mode=min")
    if metric == "val_loss" and r["trainer.limit_val_batches"] == 0:
        message = "log.ckpt.monitor is val_loss, and trainer.limit_val_batches is 0: there is none"
        yield Violation("monitor", message, "write log.ckpt.monitor=step log.ckpt.mode=max, or a number of batches")
    if r.overridden("log.ckpt.monitor") and metric not in METRICS:  # Lightning, at the first save
        near = did_you_mean(str(metric), list(METRICS)) or f"it logs {', '.join(METRICS)}"
        yield Violation("monitor", f"log.ckpt.monitor is {metric!r}, which training does not log", near)


def names(r: Reader) -> Iterator[Violation]:
    """Names tell the steps: NeMo sorts, and `recipes` reads, checkpoints by them."""
    name = r["log.ckpt.filename"]
    if isinstance(name, str) and "{step" not in name:
        message = f"log.ckpt.filename is {name!r}, without {{step}}: what was saved at which step is in no name"
        yield Violation("filename", message, "write log.ckpt.filename={step}-{consumed_samples}")


def starts(r: Reader) -> Iterator[Violation]:
    """Fine-tuning starts from weights."""
    if r.overridden("resume.restore_config") and r["resume.restore_config"] is None and r["peft"] is not None:
        message = "resume.restore_config is None: adapters would be trained beside random weights"
        yield Violation("weights", message, "leave it out, or name a checkpoint: resume.restore_config.path=PATH")
    if r["resume.restore_config"] is not None and r["resume.restore_config.path"] == "":
        yield Violation("weights", "resume.restore_config.path is empty", "name a checkpoint, or nemo://ORG/NAME")


RULES = (resumes, whole, often, newest, names, starts)
"""All rules of this file."""

PARTS = ("resume", "log.ckpt", "trainer.strategy.ckpt_load_optimizer", "trainer.strategy.ckpt_save_optimizer")
"""Parts of a configuration that these rules read."""


def violations(r: Reader) -> Iterator[Violation]:
    """All rules of this file that a configuration breaks."""
    for rule in RULES:
        yield from rule(r)
