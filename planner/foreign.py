"""Other tools' configurations as a starting point: DeepSpeed's JSON, Accelerate's YAML, Megatron-LM's arguments.

What has a counterpart here is taken over; what has none is named in `left_out`, never dropped in silence.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from superpod.planner.errors import UserError
from superpod.planner.job import Job
from superpod.planner.layout import Layout

ZERO = ("none", "zero1", "zero2", "zero3")


@dataclass
class Foreign:
    """What a file says, in this project's words."""

    layout: dict[str, Any] = field(default_factory=dict)
    """Fields of `Layout`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of `Options`."""
    gpus: int | None = None
    gbs: int | None = None
    seq: int | None = None
    precision: str | None = None
    task: str | None = None
    left_out: tuple[str, ...] = ()
    """Its keys that have no counterpart here."""

    def job(self, base: Job) -> Job:
        """The file's own run: its layout over the model, GPUs and batch of `base`."""
        tp = self.layout.get("tp", 1)
        values = {"sp": tp > 1, "gbs": base.layout.gbs, **self.layout}
        return base.replace(layout=Layout(**values), options=replace(base.options, **self.options))


def read(path: Path) -> Foreign:
    """The configuration in a file, of the kind its content shows.

    Raises:
        UserError: when it cannot be read, or is none of the kinds.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as broken:
        raise UserError(f"{path} cannot be read: {broken}") from broken
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
    except Exception as broken:  # of json, yaml, shlex: each has its own
        if isinstance(broken, (ValueError, TypeError, AttributeError)) or type(broken).__module__.startswith("yaml"):
            raise UserError(f"{path} is no configuration that can be read here: {broken}") from broken
        raise


def _mapping(value: Any, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no table of keys", "a DeepSpeed JSON, an Accelerate YAML or Megatron arguments")
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
            raise UserError(f"{key} is {value!r}, which is nothing that this key can be") from None

    @property
    def left(self) -> tuple[str, ...]:
        return tuple(sorted(self._left))


def _flat(table: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in table.items():
        name = f"{prefix}{key}"
        found += _flat(value, f"{name}.") if isinstance(value, dict) and value else [(name, value)]
    return found


def _positive(value: Any) -> int:
    number = int(value)
    if isinstance(value, bool) or number != float(value) or not 1 <= number < 2**31:
        raise ValueError(value)
    return number


def _stage(value: Any) -> str:
    number = int(value)
    if not 0 <= number <= 3:
        raise ValueError(value)
    return ZERO[number]


def _yes(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes")


def _deepspeed(table: dict[str, Any]) -> Foreign:
    """DeepSpeed's configuration JSON: ZeRO stage, batch sizes, precision, offload, AutoTP."""
    keys, found = _Keys(table), Foreign()
    found.gbs = keys.take("train_batch_size", _positive)
    mbs = keys.take("train_micro_batch_size_per_gpu", _positive)
    accumulate = keys.take("gradient_accumulation_steps", _positive)
    stage = keys.take("zero_optimization.stage", _stage)
    found.layout |= {key: value for key, value in (("mbs", mbs), ("sharding", stage)) if value is not None}
    if tp := keys.take("tensor_parallel.autotp_size", _positive):
        found.layout["tp"] = tp
    if found.gbs and mbs and accumulate:
        found.gpus = found.gbs // (mbs * accumulate) * found.layout.get("tp", 1) or None
    for key, precision in (("bf16.enabled", "bf16"), ("fp16.enabled", "fp16")):
        if keys.take(key, _yes):
            found.precision = precision
    if keys.take("zero_optimization.offload_optimizer.device", str) == "cpu":
        found.options["offload"] = 1.0
    if keys.take("activation_checkpointing.partition_activations", _yes):
        found.layout["recompute"] = "full"
    found.left_out = keys.left
    return found


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


def _accelerate(table: dict[str, Any]) -> Foreign:
    """Accelerate's YAML: FSDP, Megatron-LM or DeepSpeed plugin, processes, precision."""
    keys, found = _Keys(table), Foreign()
    found.gpus = keys.take("num_processes", _positive)
    precision = keys.take("mixed_precision", str)
    found.precision = {"fp8": "fp8cs", "no": "fp32"}.get(precision or "", precision)
    for key in ("distributed_type", "num_machines", "compute_environment", "machine_rank", "main_training_function"):
        keys.take(key)
    for name, (mine, kind) in ACCELERATE.items():
        if (value := keys.take(name, kind)) is not None:
            found.layout[mine] = value
    found.layout["sp"] = bool(found.layout.get("sp")) and found.layout.get("tp", 1) > 1
    if keys.take("deepspeed_config.offload_optimizer_device", str) == "cpu":
        found.options["offload"] = 1.0
    found.left_out = keys.left
    return found


ARGUMENTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "tensor-model-parallel-size": ("tp", _positive),
    "pipeline-model-parallel-size": ("pp", _positive),
    "num-virtual-stages-per-pipeline-rank": ("vp", _positive),
    "context-parallel-size": ("cp", _positive),
    "expert-model-parallel-size": ("ep", _positive),
    "expert-tensor-parallel-size": ("etp", _positive),
    "micro-batch-size": ("mbs", _positive),
    "sequence-parallel": ("sp", _yes),
    "recompute-granularity": ("recompute", str),
    "recompute-method": ("recompute_method", str),
    "recompute-num-layers": ("recompute_layers", _positive),
    "account-for-embedding-in-pipeline-split": ("embedding_as_layer", _yes),
    "account-for-loss-in-pipeline-split": ("loss_as_layer", _yes),
    "decoder-first-pipeline-num-layers": ("first_layers", _positive),
    "decoder-last-pipeline-num-layers": ("last_layers", _positive),
}
"""Megatron-LM's arguments (megatron/training/arguments.py) that are fields of `Layout`."""


def _megatron(text: str) -> Foreign:
    """Megatron-LM's command line, as a file of arguments or a whole script."""
    keys, found = _Keys(_arguments(text)), Foreign()
    for name, (mine, kind) in ARGUMENTS.items():
        value = keys.take(name, kind)
        if value is not None:
            found.layout[mine] = value
    found.layout["sharding"] = "zero1" if keys.take("use-distributed-optimizer", _yes) else "none"
    if modules := keys.take("recompute-modules", str):
        found.layout["recompute_modules"] = tuple(modules.split())
    found.gbs, found.seq = keys.take("global-batch-size", _positive), keys.take("seq-length", _positive)
    per_chunk = keys.take("num-layers-per-virtual-pipeline-stage", _positive)
    layers = keys.take("num-layers", _positive)
    if per_chunk and layers:
        found.layout["vp"] = max(1, layers // (found.layout.get("pp", 1) * per_chunk))
    for name, precision in (("bf16", "bf16"), ("fp16", "fp16")):
        if keys.take(name, _yes):
            found.precision = precision
    if keys.take("fp8-format", str):
        kinds = {"tensorwise": "fp8cs", "delayed": "fp8ds", "blockwise": "fp8bw", "mxfp8": "mxfp8"}
        found.precision = kinds.get(keys.take("fp8-recipe", str) or "delayed", "fp8ds")
    found.left_out = keys.left
    return found


def _arguments(text: str) -> dict[str, Any]:
    """`--name value`, `--name=value` and `--flag`; comments and line continuations as in a shell."""
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    found: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name] = value if equals else True
        elif name:
            found[name] = word if found[name] is True else f"{found[name]} {word}"
    return found
