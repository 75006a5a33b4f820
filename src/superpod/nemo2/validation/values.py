"""Check single fields for valid choices and ranges. `text_violations` checks overrides before NeMo is imported.

Megatron and NeMo annotate most choices as `str` and check them late, if at all: an unknown dispatcher in the first
layer, an unknown optimizer after the model is built, an Adam beta of 9 never. Sources: Megatron-Core 0.15.3, NeMo
2.7.3, Lightning; the comment on each line names the file or class.
"""

from __future__ import annotations

import ast
import enum
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from superpod.collection.facts.override_fields import path_of
from superpod.errors import did_you_mean
from superpod.planner.rules.rules import Violation

if TYPE_CHECKING:
    from superpod.nemo2.validation.reading import Reader

CHOICES: dict[str, tuple[str, ...]] = {
    "trainer.accelerator": ("gpu", "cuda", "auto"),  # Megatron's layers need CUDA
    "trainer.plugins.precision": ("16-mixed", "bf16-mixed", "32", "16", "bf16", "fp16", "fp16-mixed", "fp32"),
    # mixed_precision.py: with any other value, the model computes in FP32, without an error
    "trainer.plugins.fp8": ("e4m3", "hybrid"),  # core/fp8_utils.py, get_fp8_recipe
    "trainer.plugins.fp8_recipe": ("delayed", "tensorwise", "blockwise", "mxfp8"),  # core/enums.py, Fp8Recipe
    "trainer.plugins.fp8_amax_compute_algo": ("max", "most_recent"),  # TE recipe.DelayedScaling
    "trainer.strategy.fsdp": ("megatron",),  # MegatronParallel raises NotImplementedError for PyTorch's
    "trainer.strategy.save_ckpt_format": ("torch_dist", "fsdp_dtensor"),  # megatron-core deprecates zarr
    "trainer.strategy.ddp.data_parallel_sharding_strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "optim.config.optimizer": ("adam", "sgd"),  # core/optimizer/__init__.py, _get_megatron_optimizer_based_on_...
    "log.ckpt.mode": ("min", "max"),  # Lightning's ModelCheckpoint
    "model.config.moe_token_dispatcher_type": ("allgather", "alltoall", "flex"),  # moe_layer.py
    "model.config.moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
    "model.config.moe_router_score_function": ("softmax", "sigmoid"),  # moe_utils.py
    "model.config.moe_router_dtype": ("fp32", "fp64"),  # router.py
    "model.config.normalization": ("LayerNorm", "RMSNorm"),  # extensions/transformer_engine.py, TENorm
    "model.config.position_embedding_type": ("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
    "model.config.cp_comm_type": ("p2p", "a2a", "all_gather"),  # extensions/transformer_engine.py
    "model.config.cross_entropy_fusion_impl": ("native", "te"),
    "model.config.softmax_type": ("vanilla", "off-by-one", "learnable"),  # TransformerConfig
    "model.config.recompute_granularity": ("selective", "full"),
    "model.config.recompute_method": ("uniform", "block"),
    "model.config.attention_backend": ("flash", "fused", "unfused", "local", "auto"),  # AttnBackend
    "trainer.strategy.ckpt_load_strictness": (  # StrictHandling without return_*, which NeMo's io/pl.py cannot handle
        *("assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all", "ignore_all"),
    ),
    "optim.lr_scheduler.interval": ("step",),  # an epoch lasts the entire run, and Lightning ignores other values
}
"""Field -> allowed values, in addition to None."""

ALTERNATIVES = {
    "adamw": "use adam, which is AdamW in Megatron unless decoupled_weight_decay=False",
    "a2a": "use alltoall",
    "a2a+p2p": "use p2p, a2a or all_gather: NeMo 2.7.3 cannot pass hierarchical_context_parallel_sizes to Megatron, "
    "so Transformer Engine gets no process group, and each rank attends only to its own tokens",
    "cpu": "`recipes rehearse` trains a shrunk model on CPUs",
}
"""Value of other libraries -> suggestion."""


@dataclass(frozen=True)
class Range:
    """A range of numbers: `least` and `most` are inclusive bounds, `above` and `below` exclusive ones."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    also: tuple[Any, ...] = ()
    """Values outside the bounds that are allowed, too."""
    fix: str = ""
    """Suggestion for a value outside the range."""

    def __contains__(self, value: float) -> bool:
        """Return whether the value is allowed; NaN never is."""
        if value in self.also:
            return True
        return self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        limits = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        bounds = [f"{name} {limit:g}" for name, limit in limits.items() if math.isfinite(limit)]
        return ", or ".join([" and ".join(bounds), *map(str, self.also)])


FRACTION = Range(least=0, below=1)
POSITIVE = Range(above=0)
COUNT = Range(least=1)
NOT_NEGATIVE = Range(least=0)

RANGES: dict[str, Range] = {
    "optim.config.lr": Range(above=0, most=1, fix="typical peaks are 1e-5 to 1e-3: optim.config.lr=3e-4"),
    "optim.config.min_lr": NOT_NEGATIVE,
    "optim.config.weight_decay": FRACTION,
    "optim.config.adam_beta1": FRACTION,  # torch.optim.Adam rejects other values; TE's FusedAdam does not
    "optim.config.adam_beta2": FRACTION,
    "optim.config.adam_eps": POSITIVE,
    "optim.config.sgd_momentum": FRACTION,
    "optim.config.clip_grad": NOT_NEGATIVE,
    "optim.config.optimizer_offload_fraction": Range(least=0, most=1),
    "optim.lr_mult": POSITIVE,
    "optim.lr_scheduler.warmup_steps": NOT_NEGATIVE,
    "optim.lr_scheduler.constant_steps": NOT_NEGATIVE,
    "optim.lr_scheduler.min_lr": NOT_NEGATIVE,
    "optim.lr_scheduler.frequency": COUNT,  # Lightning computes a step modulo this value (training_epoch_loop.py)
    "trainer.max_steps": Range(
        least=1,
        fix="NeMo's data and schedule need a number of steps, so -1 (no limit) is not allowed: use 1000",
    ),
    "trainer.max_epochs": Range(least=1, also=(-1,), fix="set the length of the run with trainer.max_steps"),
    "trainer.num_nodes": COUNT,
    "trainer.devices": COUNT,
    "trainer.log_every_n_steps": COUNT,
    "trainer.val_check_interval": POSITIVE,  # Lightning computes a step modulo this value
    "trainer.limit_val_batches": NOT_NEGATIVE,
    "trainer.limit_test_batches": NOT_NEGATIVE,
    "trainer.limit_train_batches": Range(above=0, fix="set the length of the run with trainer.max_steps"),
    "trainer.accumulate_grad_batches": Range(
        least=1,
        most=1,
        fix="Megatron accumulates global_batch_size / (micro_batch_size x data parallel size) micro-batches: "
        "raise data.global_batch_size",
    ),
    "trainer.plugins.fp8_amax_history_len": COUNT,
    "trainer.plugins.fp8_margin": NOT_NEGATIVE,
    "trainer.plugins.num_layers_at_start_in_bf16": NOT_NEGATIVE,
    "trainer.plugins.num_layers_at_end_in_bf16": NOT_NEGATIVE,
    "trainer.strategy.ddp.bucket_size": COUNT,
    "log.ckpt.every_n_train_steps": Range(
        least=1, fix="a run that stops loses all steps since the last checkpoint: use 100"
    ),
    "log.ckpt.save_top_k": Range(least=1, also=(-1,), fix="0 saves nothing; use 3, or -1 to keep all"),
    "data.seq_length": COUNT,
    "data.micro_batch_size": COUNT,
    "data.global_batch_size": COUNT,
    "data.num_workers": NOT_NEGATIVE,
    "model.config.seq_length": COUNT,
    "model.config.num_layers": COUNT,
    "model.config.hidden_size": COUNT,
    "model.config.num_attention_heads": COUNT,
    "model.config.make_vocab_size_divisible_by": COUNT,
    "model.config.vocab_size": COUNT,
    "model.config.hidden_dropout": FRACTION,
    "model.config.attention_dropout": FRACTION,
    "model.config.init_method_std": POSITIVE,
    "model.config.layernorm_epsilon": POSITIVE,
    "model.config.rotary_base": POSITIVE,
    "model.config.rotary_percent": Range(above=0, most=1),
    "model.config.num_moe_experts": COUNT,
    "model.config.moe_router_topk": COUNT,
    "model.config.moe_z_loss_coeff": NOT_NEGATIVE,
    "model.config.moe_expert_capacity_factor": Range(above=0, also=(-1,)),  # TransformerConfig: negative means no limit
    "peft.dim": COUNT,
    "peft.alpha": POSITIVE,
    "peft.dropout": FRACTION,
}
"""Field -> range of its numbers. Other types are checked against the annotation of the field."""

INTERVAL = "log.ckpt.every_n_train_steps"
OTHER_INTERVALS = ("log.ckpt.every_n_epochs", "log.ckpt.train_time_interval")
"""If one of these is set, `INTERVAL` may be 0, which disables saving by steps (Lightning's ModelCheckpoint)."""


def violations(reader: Reader) -> Iterator[Violation]:
    """Yield a violation for each field of a configuration whose value is outside its choices or range."""
    has_other_interval = any(reader[path] for path in OTHER_INTERVALS)
    for path in (*CHOICES, *RANGES):
        if has_other_interval and path == INTERVAL and reader[path] == 0:
            continue
        yield from _check_value(path, reader[path])


def text_violations(overrides: Sequence[str]) -> Iterator[Violation]:
    """Yield a violation for each override, such as `optim.config.lr=30`, whose value is outside its choices or range.

    Of several overrides of a field, the last applies.
    """
    last = assigned_values(overrides)
    if any(literal(last.get(path, "")) for path in OTHER_INTERVALS) and last.get(INTERVAL) == "0":
        del last[INTERVAL]  # allowed: checkpoints are saved at a different interval
    for path, value in last.items():
        is_dotted_name = re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", value)  # resolved after NeMo is imported
        if (path in CHOICES or path in RANGES) and not is_dotted_name:
            yield from _check_value(path, literal(value))


def assigned_values(overrides: Sequence[str]) -> dict[str, str]:
    """Return {path: text of its last value} for overrides, without paths that a later operator such as `*=` changes."""
    last: dict[str, str] = {}
    for text in overrides:
        path_and_value = split_assignment(text)
        if path_and_value:
            last[path_and_value[0]] = path_and_value[1]
        else:  # the value depends on the recipe
            last.pop(path_of(text).strip(), None)
    return last


def split_assignment(text: str) -> tuple[str, str] | None:
    """Return the path and the text of the value in `path=value`; None for overrides with another operator."""
    match = re.fullmatch(r"\s*([A-Za-z_][\w.\[\]]*)\s*=(.*)", text, re.DOTALL)
    return (match[1], match[2].strip()) if match else None


def literal(text: str) -> Any:
    """Return the value of a Python literal, or of a name such as `true`, `none` or `inf`; other text unchanged."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        if text.lower().lstrip("+-") in ("nan", "inf", "infinity"):
            return float(text)
        return {"true": True, "false": False, "none": None, "null": None}.get(text.lower(), text)


def _check_value(path: str, value: Any) -> Iterator[Violation]:
    if path in CHOICES:
        yield from _check_choice(path, value)
    elif isinstance(value, int | float) and not isinstance(value, bool) and value not in RANGES[path]:
        fix = RANGES[path].fix or f"set {path}=VALUE with a value in that range"
        yield Violation(path, f"{path} is {value:g}; it must be {RANGES[path]}", fix)


def _check_choice(path: str, value: Any) -> Iterator[Violation]:
    choices = CHOICES[path]
    for choice in value if isinstance(value, list | tuple) else [value]:
        if isinstance(choice, enum.Enum):  # Megatron's enums: a choice is the name of some members, the value of others
            if {choice.name, str(choice.value)} & set(choices):
                continue
            choice = choice.name
        if choice is None or str(choice) in choices:
            continue
        if isinstance(choice, str | int):
            fix = ALTERNATIVES.get(str(choice)) or did_you_mean(str(choice), list(choices))
            message = f"{path} is {choice!r}; it must be one of {', '.join(choices)}"
            yield Violation(path, message, fix or f"use one of {', '.join(choices)}")
