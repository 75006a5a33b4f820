"""Import configurations of other tools: DeepSpeed JSON, Accelerate YAML, Megatron-LM arguments.

Keys with an equivalent in this project are imported; all others are listed in `left_out`.
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
from superpod.planner.formats.config_files import read_text
from superpod.planner.layout import SHARDINGS, Layout
from superpod.planner.planned_job import PlannedJob

FILE_KINDS = "a DeepSpeed JSON file, an Accelerate YAML file or a file with Megatron arguments"


@dataclass
class ImportedConfig:
    """The contents of a file, converted to this project's fields."""

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
    """Megatron-LM arguments, for `megatron_args.apply`."""
    left_out: tuple[str, ...] = ()
    """Keys without an equivalent in this project."""

    def job(self, base: PlannedJob) -> PlannedJob:
        """Return `base` with the layout and options of the file; model, GPUs and batch size stay those of `base`."""
        if self.arguments:
            made, unknown = megatron_args.apply(base, self.arguments)
            self.left_out = (*self.left_out, *unknown)
            return made.replace(layout=made.layout.replace(gbs=base.layout.gbs), seq=base.seq)
        tp = self.layout.get("tp", 1)
        values = {"sp": tp > 1, "gbs": base.layout.gbs, **self.layout}
        return base.replace(layout=Layout(**values), options=replace(base.options, **self.options))


def read(path: Path) -> ImportedConfig:
    """Read the configuration in a file; the tool is detected from its contents.

    Raises:
        UserError: the file cannot be read, or is not a DeepSpeed, Accelerate or Megatron-LM configuration.
    """
    text = read_text(path, FILE_KINDS)
    try:
        if text.lstrip().startswith("{"):
            return _import_deepspeed(_require_mapping(json.loads(text), path))
        if "--" in text and not path.suffix.lower().startswith((".yaml", ".yml")):
            return _import_megatron(text)
        import yaml  # 20 ms, and only an Accelerate file needs it

        return _import_accelerate(_require_mapping(yaml.safe_load(text), path))
    except UserError as wrong:
        raise UserError(f"{path}: {wrong}", wrong.hint) from wrong
    except ImportError as missing:
        raise UserError(f"{path} is YAML, and PyYAML is not installed", "install it: `pip install PyYAML`") from missing
    except Exception as broken:  # json, yaml and shlex raise exceptions of their own
        known_errors = (ValueError, TypeError, AttributeError, OverflowError, RecursionError)
        if isinstance(broken, known_errors) or type(broken).__module__.startswith("yaml"):
            raise UserError(f"{path} is not a supported configuration: {broken}") from broken
        raise


def _require_mapping(value: Any, path: Path) -> dict[str, Any]:
    """Return the parsed content of a file; raises UserError if it is not a mapping with keys."""
    if not isinstance(value, dict):
        raise UserError(f"{path} does not contain a mapping", f"pass {FILE_KINDS}")
    if not value:
        keys = "such as DeepSpeed's zero_optimization.stage, or Accelerate's fsdp_config.fsdp_sharding_strategy"
        raise UserError(f"the file has no keys to import ({keys})", f"pass {FILE_KINDS}")
    return value


class _Keys:
    """A nested table from which supported keys are removed one by one; the remaining keys have no equivalent."""

    def __init__(self, table: dict[str, Any]) -> None:
        self._remaining = dict(_flatten(table))

    def take(self, key: str, kind: Callable[[Any], Any] = lambda value: value) -> Any:
        """Remove a dotted key and return its converted value; None if it is absent, `null` or `auto`."""
        value = self._remaining.pop(key, None)
        if value is None or value == "auto":
            return None
        try:
            return kind(value)
        except (TypeError, ValueError, KeyError):
            raise UserError(f"{value!r} is not a valid value for {key}") from None

    @property
    def remaining(self) -> tuple[str, ...]:
        return tuple(sorted(self._remaining))


MAX_KEYS = 2_000
"""Maximum number of keys in a file; YAML aliases can expand a few lines to billions of keys."""


def _flatten(table: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return (dotted key, value) for each value of a nested table."""
    pairs: list[tuple[str, Any]] = []
    for key, value in table.items():
        name = f"{prefix}{key}"
        if len(pairs) > MAX_KEYS:
            raise UserError(f"the file has more than {MAX_KEYS:,} keys", f"pass {FILE_KINDS}")
        pairs += _flatten(value, f"{name}.") if isinstance(value, dict) and value else [(name, value)]
    return pairs


def _parse_positive_integer(value: Any) -> int:
    number = int(value)
    if isinstance(value, bool) or number != float(value) or not 1 <= number < 2**31:
        raise ValueError(value)
    return number


def _parse_zero_stage(value: Any) -> str:
    number = int(value)
    if not 0 <= number <= 3:
        raise ValueError(value)
    return SHARDINGS[number]


def _parse_flag(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes")


def _import_deepspeed(table: dict[str, Any]) -> ImportedConfig:
    """Import a parsed DeepSpeed JSON: ZeRO stage, batch sizes, precision, offload, AutoTP."""
    keys, config = _Keys(table), ImportedConfig()
    config.gbs = keys.take("train_batch_size", _parse_positive_integer)
    mbs = keys.take("train_micro_batch_size_per_gpu", _parse_positive_integer)
    accumulate = keys.take("gradient_accumulation_steps", _parse_positive_integer)
    stage = keys.take("zero_optimization.stage", _parse_zero_stage)
    config.layout |= {key: value for key, value in (("mbs", mbs), ("sharding", stage)) if value is not None}
    if tp := keys.take("tensor_parallel.autotp_size", _parse_positive_integer):
        config.layout["tp"] = tp
    if config.gbs and mbs and accumulate:
        config.gpus = config.gbs // (mbs * accumulate) * config.layout.get("tp", 1) or None
    for key, precision in (("bf16.enabled", "bf16"), ("fp16.enabled", "fp16")):
        if keys.take(key, _parse_flag):
            config.precision = precision
    if keys.take("zero_optimization.offload_optimizer.device", str) == "cpu":
        config.options["offload"] = 1.0
    if keys.take("activation_checkpointing.partition_activations", _parse_flag):
        config.layout["recompute"] = "full"
    config.left_out = keys.remaining
    return config


FSDP = {"FULL_SHARD": "zero3", "SHARD_GRAD_OP": "zero2", "NO_SHARD": "none", "HYBRID_SHARD": "zero3"}
FSDP2 = {"TRUE": "zero3", "FALSE": "zero2"}
"""fsdp_sharding_strategy in FSDP 1, fsdp_reshard_after_forward in FSDP 2 (huggingface.co/docs/accelerate, fsdp)."""

LM = "megatron_lm_config.megatron_lm_"
ACCELERATE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "fsdp_config.fsdp_sharding_strategy": ("sharding", lambda v: FSDP[str(v).upper()]),
    "fsdp_config.fsdp_reshard_after_forward": ("sharding", lambda v: {**FSDP, **FSDP2}[str(v).upper()]),
    "fsdp_config.fsdp_activation_checkpointing": ("recompute", lambda v: "full" if _parse_flag(v) else "none"),
    "deepspeed_config.zero_stage": ("sharding", _parse_zero_stage),
    LM + "tp_degree": ("tp", _parse_positive_integer),
    LM + "pp_degree": ("pp", _parse_positive_integer),
    LM + "sequence_parallelism": ("sp", _parse_flag),
    LM + "recompute_activations": ("recompute", lambda v: "selective" if _parse_flag(v) else "none"),
    LM + "use_distributed_optimizer": ("sharding", lambda v: "zero1" if _parse_flag(v) else "none"),
}
"""Accelerate key -> field of `Layout`, and the conversion of its value."""


def _import_accelerate(table: dict[str, Any]) -> ImportedConfig:
    """Import a parsed Accelerate YAML: FSDP, Megatron-LM or DeepSpeed plugin, processes, precision."""
    keys, config = _Keys(table), ImportedConfig()
    config.gpus = keys.take("num_processes", _parse_positive_integer)
    precision = keys.take("mixed_precision", str)
    config.precision = {"fp8": "fp8cs", "no": "fp32"}.get(precision or "", precision)
    for key in ("distributed_type", "num_machines", "compute_environment", "machine_rank", "main_training_function"):
        keys.take(key)
    for name, (layout_key, kind) in ACCELERATE.items():
        if (value := keys.take(name, kind)) is not None:
            config.layout[layout_key] = value
    config.layout["sp"] = bool(config.layout.get("sp")) and config.layout.get("tp", 1) > 1
    if keys.take("deepspeed_config.offload_optimizer_device", str) == "cpu":
        config.options["offload"] = 1.0
    config.left_out = keys.remaining
    return config


def _import_megatron(text: str) -> ImportedConfig:
    """Import Megatron-LM arguments from a list of arguments or a launch script."""
    args = megatron_args.parse(_strip_shell_syntax(text))
    if not args:
        raise UserError("the file contains no Megatron arguments", "write the arguments without shell variables")
    config = ImportedConfig(arguments={k: v for k, v in args.items() if not VARIABLE.search(v)})
    config.left_out = tuple(f"{name} {value}" for name, value in sorted(args.items()) if VARIABLE.search(value))
    for key, name in (("gbs", "global-batch-size"), ("seq", "seq-length")):
        value = config.arguments.get(name, "")
        if value and not value.isdigit():
            raise UserError(f"{value!r} is not a valid value for {name}")
        setattr(config, key, int(value) if value else None)
    return config


VARIABLE = re.compile(r"[$`]")
"""Matches a shell variable or command substitution."""


def _strip_shell_syntax(text: str) -> str:
    """Remove shell syntax from a script: comments, arrays, quotes, redirections, command separators."""
    text = re.sub(r"#.*", "", text.replace("\\\n", " "))
    text = re.sub(r"\d?>&\d|\d?>\S*|\|.*|&&|;", " ", text)
    return re.sub(r"""[()"']|^\s*\w+\+?=(?=[("'\s])""", " ", text, flags=re.MULTILINE)
