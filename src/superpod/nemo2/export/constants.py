"""What stands at the top of an exported file under a name of its own: the values that its owner changes first."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import fiddle as fdl

FOLDER = "log.log_dir"
"""Where checkpoints and logs go; written into every file, also where it has NeMo's default."""


@dataclass(frozen=True)
class Constant:
    """A named value of a file."""

    name: str
    value: object
    why: str
    """The comment on it, or ""."""


KNOWN: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("NAME", ("log.name", "log.tensorboard.name"), ""),
    ("NODES", ("trainer.num_nodes",), ""),
    ("GPUS_PER_NODE", ("trainer.devices",), ""),
    ("SEQ_LENGTH", ("data.seq_length", "model.config.seq_length"), "tokens a sample"),
    ("MICRO_BATCH_SIZE", ("data.micro_batch_size",), "samples at a time: activations grow with it"),
    ("GLOBAL_BATCH_SIZE", ("data.global_batch_size",), "samples a step, a multiple of micro batch x data parallelism"),
    ("MAX_STEPS", ("trainer.max_steps",), ""),
    ("LEARNING_RATE", ("optim.config.lr",), "the highest, after the warm-up"),
    ("MIN_LEARNING_RATE", ("optim.lr_scheduler.min_lr",), "after the last step"),
    ("WARMUP_STEPS", ("optim.lr_scheduler.warmup_steps",), ""),
    ("SAVE_EVERY", ("log.ckpt.every_n_train_steps",), "steps between two checkpoints"),
    ("FOLDER", (FOLDER,), "for checkpoints and logs; None: nemo_experiments, where it is started"),
    ("WEIGHTS", ("resume.restore_config.path",), "where training starts; `nemo llm import` puts them there"),
    ("DATA", ("data.paths",), "tokenized text: .bin and .idx files, without their endings"),
    ("DATA", ("data.dataset_root",), "training.jsonl, validation.jsonl, test.jsonl"),
)
"""Name, the paths that take it, why. A path that has another value than the first keeps its own."""


def with_folder(partial: fdl.Buildable) -> fdl.Buildable:
    """The recipe, or a copy that says the folder of its logs where it leaves it to NeMo's default: an equal one."""
    log = getattr(partial, "log", None)
    if not isinstance(log, fdl.Buildable) or "log_dir" in log.__arguments__ or not _takes(log, "log_dir"):
        return partial
    partial = copy.deepcopy(partial)
    partial.log.log_dir = None
    return partial


def _takes(config: fdl.Buildable, name: str) -> bool:
    return name in config.__signature_info__.parameters


def constants(partial: fdl.Buildable) -> Mapping[str, Constant]:
    """Path -> constant, of each path of the recipe that has one."""
    by_path: dict[str, Constant] = {}
    names: dict[str, Constant] = {}
    for name, paths, why in KNOWN:
        for path in paths:
            is_set, value = _at(partial, path)
            if not is_set or isinstance(value, fdl.Buildable):
                continue
            constant = names.setdefault(name, Constant(name, value, why))
            if type(constant.value) is type(value) and constant.value == value:
                by_path[path] = constant
    return by_path


def _at(partial: fdl.Buildable, path: str) -> tuple[bool, object]:
    """Whether the recipe sets the value at a path, and the value."""
    value: object = partial
    for name in path.split("."):
        if not isinstance(value, fdl.Buildable) or name not in value.__arguments__:
            return False, None
        value = value.__arguments__[name]
    return True, value
