"""Check the requirements of resuming: complete checkpoints are saved and kept, and the next attempt finds them."""

from __future__ import annotations

from collections.abc import Iterator

from superpod.errors import did_you_mean
from superpod.nemo2.validation.reading import Reader
from superpod.planner.rules.rules import Violation

METRICS = ("step", "epoch", "global_step", "consumed_samples", "reduced_train_loss", "val_loss", "lr", "grad_norm")
"""Metrics that NeMo logs, and by which checkpoints can be ranked."""
INCREASING_METRICS = ("step", "epoch", "global_step", "consumed_samples")
"""Metrics that are largest for the newest checkpoint."""


def check_resume(r: Reader) -> Iterator[Violation]:
    """Yield a violation unless each attempt resumes from the last checkpoint of the previous one (NeMo's resume.py)."""
    if r["resume.resume_if_exists"] is False:
        yield Violation(
            "resume",
            "resume.resume_if_exists is False: every attempt would restart at step 0 and overwrite the previous one",
            "keep it True; it has no effect without a checkpoint",
        )
    elif r["resume.resume_ignore_no_checkpoint"] is False and r["resume.restore_config"] is None:
        yield Violation(
            "first_attempt",
            "resume.resume_ignore_no_checkpoint is False: the first attempt would stop because there is no checkpoint",
            "set resume.resume_ignore_no_checkpoint=True",
        )
    if not r["log.ckpt.save_last"] and r["log.ckpt"] is not None:
        yield Violation(
            "save_last",
            f"log.ckpt.save_last is {r['log.ckpt.save_last']!r}, but attempts resume only from *-last: each attempt "
            "would restart at step 0",
            "set log.ckpt.save_last=link, or True for a second copy",
        )


def check_optimizer_state(r: Reader) -> Iterator[Violation]:
    """Yield a violation if checkpoints lack the optimizer state, or resumed attempts do not load it."""
    for path, bad, effect in (
        ("log.ckpt.save_weights_only", True, "checkpoints would have no optimizer state"),
        ("trainer.strategy.ckpt_save_optimizer", False, "checkpoints would have no optimizer state"),
        ("trainer.strategy.ckpt_load_optimizer", False, "attempts would not load the optimizer state"),
    ):
        if r[path] is bad:
            yield Violation(
                path.rpartition(".")[2],
                f"{path} is {bad}: {effect}, and a resumed run would reset Adam's moments and the schedule",
                f"set {path}={not bad}; to save weights only, use `recipes ckpt convert`",
            )


def check_interval(r: Reader) -> Iterator[Violation]:
    """Yield a violation unless checkpoints are saved during the run, at exactly one interval."""
    if r["trainer.enable_checkpointing"] is False:  # Lightning raises if there is a ModelCheckpoint callback
        message = "trainer.enable_checkpointing is False, but the run saves checkpoints with a callback"
        yield Violation("checkpointing", message, "keep it True; log.ckpt sets the interval and number of checkpoints")
    intervals = ("every_n_train_steps", "every_n_epochs", "train_time_interval")
    set_intervals = [name for name in intervals if r[f"log.ckpt.{name}"]]
    if r["log.ckpt"] is not None and r["log.ckpt.every_n_train_steps"] != 0 and not set_intervals:
        steps = r["trainer.max_steps"]
        message = f"log.ckpt has no save interval: a run that stops before step {steps} would lose all steps"
        yield Violation("interval", message, "set log.ckpt.every_n_train_steps=100")
    if len(set_intervals) > 1:  # Lightning's ModelCheckpoint
        message = f"log.ckpt has {' and '.join(set_intervals)}, but only one interval is allowed"
        yield Violation("intervals", message, f"set log.ckpt.{set_intervals[-1]}=None")


def check_ranking(r: Reader) -> Iterator[Violation]:
    """Yield a violation if the oldest or worst checkpoints are kept, or their metric is not logged."""
    metric, mode = r["log.ckpt.monitor"], r["log.ckpt.mode"]
    if metric is None:
        return
    if metric in INCREASING_METRICS and mode == "min":
        message = f"log.ckpt.monitor is {metric} and mode is min: the oldest checkpoints would be kept, not the newest"
        yield Violation("mode", message, "set log.ckpt.mode=max")
    if "loss" in str(metric) and mode == "max":
        message = f"log.ckpt.monitor is {metric} and mode is max: the worst checkpoints would be kept, not the best"
        yield Violation("mode", message, "set log.ckpt.mode=min")
    if metric == "val_loss" and r["trainer.limit_val_batches"] == 0:
        message = "log.ckpt.monitor is val_loss, but trainer.limit_val_batches is 0: there is no validation loss"
        yield Violation("monitor", message, "set log.ckpt.monitor=step log.ckpt.mode=max, or raise limit_val_batches")
    if r.is_overridden("log.ckpt.monitor") and metric not in METRICS:  # Lightning raises at the first save
        fix = did_you_mean(str(metric), list(METRICS)) or f"logged metrics: {', '.join(METRICS)}"
        yield Violation("monitor", f"log.ckpt.monitor is {metric!r}, which is not a logged metric", fix)


def check_filename(r: Reader) -> Iterator[Violation]:
    """Yield a violation if checkpoint names lack the step, by which NeMo sorts and which `recipes` reads."""
    name = r["log.ckpt.filename"]
    if isinstance(name, str) and "{step" not in name:
        message = f"log.ckpt.filename is {name!r}; it must contain {{step}}, because checkpoints are sorted by step"
        yield Violation("filename", message, "set log.ckpt.filename={step}-{consumed_samples}")


def check_initial_weights(r: Reader) -> Iterator[Violation]:
    """Yield a violation if adapters would start from random weights, or the initial weights have an empty path."""
    if r.is_overridden("resume.restore_config") and r["resume.restore_config"] is None and r["peft"] is not None:
        message = "resume.restore_config is None: adapters would be trained on top of random weights"
        yield Violation("weights", message, "leave it out, or specify a checkpoint: resume.restore_config.path=PATH")
    if r["resume.restore_config"] is not None and r["resume.restore_config.path"] == "":
        yield Violation("weights", "resume.restore_config.path is empty", "set it to a checkpoint, or nemo://ORG/NAME")


RULES = (check_resume, check_optimizer_state, check_interval, check_ranking, check_filename, check_initial_weights)

PARTS = ("resume", "log.ckpt", "trainer.strategy.ckpt_load_optimizer", "trainer.strategy.ckpt_save_optimizer")
"""Parts of a configuration that most of these rules read."""


def violations(r: Reader) -> Iterator[Violation]:
    """Yield the violations that the `RULES` of this file find."""
    for rule in RULES:
        yield from rule(r)
