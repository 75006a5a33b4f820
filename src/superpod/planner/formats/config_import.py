"""Imports the configurations of other tools: DeepSpeed's JSON, Accelerate's YAML, Megatron-LM's arguments.

Keys with a counterpart here are taken over. The others are listed in `left_out`; none is dropped silently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from superpod.errors import UserError
from superpod.planner.formats import megatron_args
from superpod.planner.formats.files import read_text
from superpod.planner.layout import SHARDINGS, Layout
from superpod.planner.planned_job import PlannedJob

WANTED = "a DeepSpeed JSON, an Accelerate YAML or Megatron arguments"


@dataclass
class ImportedConfig:
    """The content of a file in this project's terms."""

    layout: dict[str, Any] = field(default_factory=dict)
    """Fields of `Layout`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of `Options`."""
    gpus: int | None = None
    gbs: int | None = None
    seq: int | None = None
    precision: str | None = None
    task: str | None = None
    arguments: dict[str, str] = field(default_factory=dict)
    """Megatron-LM's own, for `megatron_args.apply`."""
    left_out: tuple[str, ...] = ()
    """Its keys that have no counterpart here."""

    def job(self, base: PlannedJob) -> PlannedJob:
        """The file's own run: its layout over the model, GPUs and batch of `base`."""
        if self.arguments:
            made, unknown = megatron_args.apply(base, self.arguments)
            self.left_out = (*self.left_out, *unknown)
            return made.replace(layout=made.layout.replace(gbs=base.layout.gbs), seq=base.seq)
        tp = self.layout.get("tp", 1)
        values = {"sp": tp > 1, "gbs": base.layout.gbs, **self.layout}
        return base.replace(layout=Layout(**values), options=replace(base.options, **self.options))


def read(path: Path) -> ImportedConfig:
    """The configuration in a file; its content decides of which tool it is.

    Raises:
        UserError: when it cannot be read, or belongs to none of the tools.
    """
    text = read_text(path, WANTED)
    try:
        if text.lstrip().startswith("{"):
            return _deepspeed(_mapping(json.loads(text), path))
        if "--" in text and not path.suffix.lower().startswith((".yaml", ".yml")):
            return _megatron(text)
        import yaml  # 20 ms, and only an Accelerate file needs it

        return _accelerate(_mapping(yaml.safe_load(text), path))
    except UserError as wrong:
        raise UserError(f"{path}: {wrong}", wrong.hint) from wrong
    except ImportError as missing:
        raise UserError(f"{path} is YAML, and PyYAML is not installed", "pip install PyYAML") from missing
    except Exception as broken:  # json, yaml and shlex raise exceptions of their own
        known = (ValueError, TypeError, AttributeError, OverflowError, RecursionError)
        if isinstance(broken, known) or type(broken).__module__.startswith("yaml"):
            raise UserError(f"{path} is not a supported configuration: {broken}") from broken
        raise


def _mapping(value: Any, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{path} does not contain a mapping", f"pass {WANTED}")
    if not value:
        keys = "such as zero_optimization.stage of DeepSpeed, or fsdp_config.fsdp_sharding_strategy of Accelerate"
        raise UserError(f"the file has no key to import ({keys})", f"pass {WANTED}")
    return value


class _Keys:
    """A nested table whose keys are taken one by one; what is left is what has no counterpart."""

    def __init__(self, table: dict[str, Any]) -> None:
        self._left = dict(_flat(table))

    def take(self, key: str, kind: Callable[[Any], Any] = lambda value: value) -> Any:
        """The value of a dotted key, converted; None when absent, `null` or `auto`."""
        value = self._left.pop(key, None)
        if value is None or value == "auto":
            return None
        try:
            return kind(value)
        except (TypeError, ValueError, KeyError):
            raise UserError(f"{value!r} is not a valid value of {key}") from None

    @property
    def left(self) -> tuple[str, ...]:
        return tuple(sorted(self._left))


MOST_KEYS = 2_000
"""Most keys of one file; YAML's aliases can expand a few lines to billions."""


def _flat(table: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in table.items():
        name = f"{prefix}{key}"
        if len(pairs) > MOST_KEYS:
            raise UserError(f"the file has more than {MOST_KEYS:,} keys", f"pass {WANTED}")
        pairs += _flat(value, f"{name}.") if isinstance(value, dict) and value else [(name, value)]
    return pairs


def _positive(value: Any) -> int:
    number = int(value)
    if isinstance(value, bool) or number != float(value) or not 1 <= number < 2**31:
        raise ValueError(value)
    return number


def _stage(value: Any) -> str:
    number = int(value)
    if not 0 <= number <= 3:
        raise ValueError(value)
    return SHARDINGS[number]


def _yes(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes")


def _deepspeed(table: dict[str, Any]) -> ImportedConfig:
    """DeepSpeed's configuration JSON: ZeRO stage, batch sizes, precision, offload, AutoTP."""
    keys, config = _Keys(table), ImportedConfig()
    config.gbs = keys.take("train_batch_size", _positive)
    mbs = keys.take("train_micro_batch_size_per_gpu", _positive)
    accumulate = keys.take("gradient_accumulation_steps", _positive)
    stage = keys.take("zero_optimization.stage", _stage)
    config.layout |= {key: value for key, value in (("mbs", mbs), ("sharding", stage)) if value is not None}
    if tp := keys.take("tensor_parallel.autotp_size", _positive):
        config.layout["tp"] = tp
    if config.gbs and mbs and accumulate:
        config.gpus = config.gbs // (mbs * accumulate) * config.layout.get("tp", 1) or None
    for key, precision in (("bf16.enabled", "bf16"), ("fp16.enabled", "fp16")):
        if keys.take(key, _yes):
            config.precision = precision
    if keys.take("zero_optimization.offload_optimizer.device", str) == "cpu":
        config.options["offload"] = 1.0
    if keys.take("activation_checkpointing.partition_activations", _yes):
        config.layout["recompute"] = "full"
    config.left_out = keys.left
    return config


FSDP = {"FULL_SHARD": "zero3", "SHARD_GRAD_OP": "zero2", "NO_SHARD": "none", "HYBRID_SHARD": "zero3"}
FSDP2 = {"TRUE": "zero3", "FALSE": "zero2"}
"""fsdp_sharding_strategy of FSDP 1, fsdp_reshard_after_forward of FSDP 2 (huggingface.co/docs/accelerate, fsdp)."""

LM = "megatron_lm_config.megatron_lm_"
ACCELERATE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "fsdp_config.fsdp_sharding_strategy": ("sharding", lambda v: FSDP[str(v).upper()]),
    "fsdp_config.fsdp_reshard_after_forward": ("sharding", lambda v: {**FSDP, **FSDP2}[str(v).upper()]),
    "fsdp_config.fsdp_activation_checkpointing": ("recompute", lambda v: "full" if _yes(v) else "none"),
    "deepspeed_config.zero_stage": ("sharding", _stage),
    LM + "tp_degree": ("tp", _positive),
    LM + "pp_degree": ("pp", _positive),
    LM + "sequence_parallelism": ("sp", _yes),
    LM + "recompute_activations": ("recompute", lambda v: "selective" if _yes(v) else "none"),
    LM + "use_distributed_optimizer": ("sharding", lambda v: "zero1" if _yes(v) else "none"),
}
"""Accelerate's keys that are fields of `Layout`."""


def _accelerate(table: dict[str, Any]) -> ImportedConfig:
    """Accelerate's YAML: FSDP, Megatron-LM or DeepSpeed plugin, processes, precision."""
    keys, config = _Keys(table), ImportedConfig()
    config.gpus = keys.take("num_processes", _positive)
    precision = keys.take("mixed_precision", str)
    config.precision = {"fp8": "fp8cs", "no": "fp32"}.get(precision or "", precision)
    for key in ("distributed_type", "num_machines", "compute_environment", "machine_rank", "main_training_function"):
        keys.take(key)
    for name, (mine, kind) in ACCELERATE.items():
        if (value := keys.take(name, kind)) is not None:
            config.layout[mine] = value
    config.layout["sp"] = bool(config.layout.get("sp")) and config.layout.get("tp", 1) > 1
    if keys.take("deepspeed_config.offload_optimizer_device", str) == "cpu":
        config.options["offload"] = 1.0
    config.left_out = keys.left
    return config


def _megatron(text: str) -> ImportedConfig:
    """Megatron-LM's command line, as a file of arguments or a whole script: read by `megatron_args`."""
    args = megatron_args.parse(_plain(text))
    if not args:
        raise UserError("the file has no literal argument", "write the arguments without shell variables")
    config = ImportedConfig(arguments={k: v for k, v in args.items() if not VARIABLE.search(v)})
    config.left_out = tuple(f"{name} {value}" for name, value in sorted(args.items()) if VARIABLE.search(value))
    number = {key: config.arguments.get(name, "") for key, name in BATCH.items()}
    for key, value in number.items():
        if value and not value.isdigit():
            raise UserError(f"{value!r} is not a valid value of {BATCH[key]}")
    config.gbs, config.seq = (int(number[key]) if number[key] else None for key in ("gbs", "seq"))
    return config


BATCH = {"gbs": "global-batch-size", "seq": "seq-length"}
VARIABLE = re.compile(r"[$`]")
"""A value that only the shell knows."""


def _plain(text: str) -> str:
    """A script's arguments without the shell around them: arrays, quotes, redirections, other commands."""
    text = re.sub(r"#.*", "", text.replace("\\\n", " "))
    text = re.sub(r"\d?>&\d|\d?>\S*|\|.*|&&|;", " ", text)
    return re.sub(r"""[()"']|^\s*\w+\+?=(?=[("'\s])""", " ", text, flags=re.MULTILINE)
