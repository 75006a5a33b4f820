"""Choose the constants at the top of an exported file: the values that users are most likely to change."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import fiddle as fdl

FOLDER = "log.log_dir"
"""Path of the folder of checkpoints and logs; every file sets it, even if it is NeMo's default."""


@dataclass(frozen=True)
class Constant:
    """A named value of an exported file."""

    name: str
    value: object
    why: str
    """Comment after the constant; "" = none."""


KNOWN: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("NAME", ("log.name", "log.tensorboard.name"), ""),
    ("NODES", ("trainer.num_nodes",), ""),
    ("GPUS_PER_NODE", ("trainer.devices",), ""),
    ("SEQ_LENGTH", ("data.seq_length", "model.config.seq_length"), "tokens per sample"),
    ("MICRO_BATCH_SIZE", ("data.micro_batch_size",), "samples per forward pass; memory of activations grows with it"),
    (
        "GLOBAL_BATCH_SIZE",
        ("data.global_batch_size",),
        "samples per step: a multiple of micro-batch size x data-parallel size",
    ),
    ("MAX_STEPS", ("trainer.max_steps",), ""),
    ("LEARNING_RATE", ("optim.config.lr",), "peak, reached after the warm-up"),
    ("MIN_LEARNING_RATE", ("optim.lr_scheduler.min_lr",), "reached at the last step"),
    ("WARMUP_STEPS", ("optim.lr_scheduler.warmup_steps",), ""),
    ("SAVE_EVERY", ("log.ckpt.every_n_train_steps",), "steps between two checkpoints"),
    ("FOLDER", (FOLDER,), "checkpoints and logs; None: nemo_experiments in the current folder"),
    ("WEIGHTS", ("resume.restore_config.path",), "initial weights; written by `nemo llm import`"),
    ("DATA", ("data.paths",), "tokenized text: paths of .bin and .idx files without the suffix"),
    ("DATA", ("data.dataset_root",), "folder with training.jsonl, validation.jsonl and test.jsonl"),
)
"""Name, paths and comment of each constant. It replaces the values of the paths that equal that of the first path."""


def set_log_folder(partial: fdl.Buildable) -> fdl.Buildable:
    """Return the recipe if it sets its log folder; otherwise, a copy that sets it to NeMo's default, None."""
    log = getattr(partial, "log", None)
    if not isinstance(log, fdl.Buildable) or "log_dir" in log.__arguments__:
        return partial
    if "log_dir" not in log.__signature_info__.parameters:
        return partial
    partial = copy.deepcopy(partial)
    partial.log.log_dir = None
    return partial


def constants(partial: fdl.Buildable) -> Mapping[str, Constant]:
    """Return {path: constant that replaces the value at this path} for a recipe."""
    by_path: dict[str, Constant] = {}
    by_name: dict[str, Constant] = {}
    for name, paths, why in KNOWN:
        for path in paths:
            is_set, value = _get_by_path(partial, path)
            if not is_set or isinstance(value, fdl.Buildable):
                continue
            constant = by_name.setdefault(name, Constant(name, value, why))
            if type(constant.value) is type(value) and constant.value == value:
                by_path[path] = constant
    return by_path


def _get_by_path(partial: fdl.Buildable, path: str) -> tuple[bool, object]:
    """Return whether a recipe sets the value at a path, and the value (None if it does not)."""
    value: object = partial
    for name in path.split("."):
        if not isinstance(value, fdl.Buildable) or name not in value.__arguments__:
            return False, None
        value = value.__arguments__[name]
    return True, value
