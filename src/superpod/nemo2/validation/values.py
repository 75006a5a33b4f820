"""Words and ranges of single fields, as tables. Plain values: `of_text` refuses them before NeMo is imported.

Megatron and NeMo annotate most words as `str` and check them after the weights are drawn, if at all: an unknown
dispatcher is met by the first layer, an unknown optimizer after the model is built, a moment's decay of 9 never.
Sources: Megatron-Core 0.15.3, NeMo 2.7.3, Lightning; the comment beside a line names the place.
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

WORDS: dict[str, tuple[str, ...]] = {
    "trainer.accelerator": ("gpu", "cuda", "auto"),  # Megatron's layers are CUDA's
    "trainer.plugins.precision": ("16-mixed", "bf16-mixed", "32", "16", "bf16", "fp16", "fp16-mixed", "fp32"),
    # mixed_precision.py: any other word computes in fp32, without an error
    "trainer.plugins.fp8": ("e4m3", "hybrid"),  # core/fp8_utils.py, get_fp8_recipe
    "trainer.plugins.fp8_recipe": ("delayed", "tensorwise", "blockwise", "mxfp8"),  # core/enums.py, Fp8Recipe
    "trainer.plugins.fp8_amax_compute_algo": ("max", "most_recent"),  # TE recipe.DelayedScaling
    "trainer.strategy.fsdp": ("megatron",),  # MegatronParallel raises NotImplementedError for PyTorch's
    "trainer.strategy.save_ckpt_format": (
        "torch_dist",
        "fsdp_dtensor",
    ),  # zarr is not installed, and megatron-core deprecates it
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
    "trainer.strategy.ckpt_load_strictness": (  # StrictHandling; of return_*, NeMo's io/pl.py would read a tuple
        *("assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all", "ignore_all"),
    ),
    "optim.lr_scheduler.interval": ("step",),  # Lightning steps by epoch only at its end, and leaves any other word out
}
"""Field -> the words that it takes; None is taken too."""

INSTEAD = {
    "adamw": "write adam: Megatron's is AdamW unless decoupled_weight_decay=False",
    "a2a": "write alltoall",
    "a2a+p2p": "write p2p, a2a or all_gather: NeMo 2.7.3 cannot pass hierarchical_context_parallel_sizes to Megatron, "
    "so that Transformer Engine gets no group and each rank attends to its own tokens only",
    "cpu": "`recipes rehearse` trains it on CPUs, shrunk",
}
"""What to write for a word that another library has."""


@dataclass(frozen=True)
class Range:
    """What a number may be: `least` to `most`, both included, unless `above` or `below` says otherwise."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    also: tuple[Any, ...] = ()
    """values beside the range"""
    fix: str = ""

    def holds(self, value: float) -> bool:
        """Whether the range has the value; NaN is in none."""
        if value in self.also:
            return True
        return self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        low = f"from {self.least:g} on" if self.least > -math.inf else f"above {self.above:g}"
        no_low = self.least == self.above == -math.inf
        high = f"to {self.most:g}" if self.most < math.inf else f"below {self.below:g}" if self.below < math.inf else ""
        if not no_low and high:
            low = low.removesuffix(" on")
        return " ".join(filter(None, ["" if no_low else low, high])) + "".join(f", or {value}" for value in self.also)


SHARE = Range(least=0, below=1)
POSITIVE = Range(above=0)
COUNT = Range(least=1)
NOT_NEGATIVE = Range(least=0)

RANGES: dict[str, Range] = {
    "optim.config.lr": Range(above=0, most=1, fix="models peak at 1e-5 to 1e-3: optim.config.lr=3e-4"),
    "optim.config.min_lr": NOT_NEGATIVE,
    "optim.config.weight_decay": Range(least=0, below=1),
    "optim.config.adam_beta1": SHARE,  # torch.optim.Adam refuses others; TE's FusedAdam does not
    "optim.config.adam_beta2": SHARE,
    "optim.config.adam_eps": POSITIVE,
    "optim.config.sgd_momentum": SHARE,
    "optim.config.clip_grad": NOT_NEGATIVE,
    "optim.config.optimizer_offload_fraction": Range(least=0, most=1),
    "optim.lr_mult": POSITIVE,
    "optim.lr_scheduler.warmup_steps": NOT_NEGATIVE,
    "optim.lr_scheduler.constant_steps": NOT_NEGATIVE,
    "optim.lr_scheduler.min_lr": NOT_NEGATIVE,
    "optim.lr_scheduler.frequency": COUNT,  # Lightning takes it modulo, training_epoch_loop.py
    "trainer.max_steps": Range(
        least=1,
        fix="NeMo's data and schedule are made for a number of steps, so that -1, no limit, is none: write 1000, say",
    ),
    "trainer.max_epochs": Range(least=1, also=(-1,), fix="trainer.max_steps says how long a run is"),
    "trainer.num_nodes": COUNT,
    "trainer.devices": COUNT,
    "trainer.log_every_n_steps": COUNT,
    "trainer.val_check_interval": Range(above=0),  # Lightning takes it modulo
    "trainer.limit_val_batches": NOT_NEGATIVE,
    "trainer.limit_test_batches": NOT_NEGATIVE,
    "trainer.limit_train_batches": Range(above=0, fix="trainer.max_steps says how long a run is"),
    "trainer.accumulate_grad_batches": Range(
        least=1,
        most=1,
        fix="Megatron accumulates global_batch_size / (micro_batch_size x data parallel): raise data.global_batch_size",
    ),
    "trainer.plugins.fp8_amax_history_len": COUNT,
    "trainer.plugins.fp8_margin": NOT_NEGATIVE,
    "trainer.plugins.num_layers_at_start_in_bf16": NOT_NEGATIVE,
    "trainer.plugins.num_layers_at_end_in_bf16": NOT_NEGATIVE,
    "trainer.strategy.ddp.bucket_size": Range(least=1),
    "log.ckpt.every_n_train_steps": Range(least=1, fix="a stopped run loses what it has not saved: write 100, say"),
    "log.ckpt.save_top_k": Range(least=1, also=(-1,), fix="0 saves nothing; write 3, or -1 to keep all"),
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
    "model.config.hidden_dropout": SHARE,
    "model.config.attention_dropout": SHARE,
    "model.config.init_method_std": POSITIVE,
    "model.config.layernorm_epsilon": POSITIVE,
    "model.config.rotary_base": POSITIVE,
    "model.config.rotary_percent": Range(above=0, most=1),
    "model.config.num_moe_experts": COUNT,
    "model.config.moe_router_topk": COUNT,
    "model.config.moe_z_loss_coeff": NOT_NEGATIVE,
    "model.config.moe_expert_capacity_factor": Range(above=0, also=(-1,)),  # TransformerConfig: below 0 is none
    "peft.dim": COUNT,
    "peft.alpha": POSITIVE,
    "peft.dropout": SHARE,
}
"""Field -> the numbers that it takes; None, and what is no number, are the annotation's business."""


INTERVAL = "log.ckpt.every_n_train_steps"
OTHER_INTERVALS = ("log.ckpt.every_n_epochs", "log.ckpt.train_time_interval")
"""0 steps mean no saving by steps (Lightning's ModelCheckpoint): fine where another interval is set."""


def violations(reader: Reader) -> Iterator[Violation]:
    """The fields of a configuration whose value is none that they take."""
    other = any(reader[path] for path in OTHER_INTERVALS)
    for path in (*WORDS, *RANGES):
        if not (other and path == INTERVAL and reader[path] == 0):
            yield from _violation(path, reader[path])


def of_text(overrides: Sequence[str]) -> Iterator[Violation]:
    """The same of overrides as they are written: `optim.config.lr=30`. The last one of a field counts."""
    last = assigned(overrides)
    if any(literal(last.get(path, "")) for path in OTHER_INTERVALS) and last.get(INTERVAL) == "0":
        del last[INTERVAL]  # Lightning saves at the other interval alone
    for path, value in last.items():
        if (path in WORDS or path in RANGES) and not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", value):
            yield from _violation(path, literal(value))  # a dotted name has a value once NeMo is imported


def assigned(overrides: Sequence[str]) -> dict[str, str]:
    """Path -> text of the last plain `path=value`; without paths whose value another operator changes after it."""
    last: dict[str, str] = {}
    for text in overrides:
        if plain := assignment(text):
            last[plain[0]] = plain[1]
        else:  # `*=` and its kin change a value that only the built recipe has
            last.pop(path_of(text).strip(), None)
    return last


def assignment(text: str) -> tuple[str, str] | None:
    """Path and text of the value of a plain `path=value`; None of any other operator."""
    match = re.fullmatch(r"\s*([A-Za-z_][\w.\[\]]*)\s*=(.*)", text, re.DOTALL)
    return (match[1], match[2].strip()) if match else None


def literal(text: str) -> Any:
    """The value of a text that is a literal of Python or a word for one; any other text as it is."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        if text.lower().lstrip("+-") in ("nan", "inf", "infinity"):
            return float(text)
        return {"true": True, "false": False, "none": None, "null": None}.get(text.lower(), text)


def _violation(path: str, value: Any) -> Iterator[Violation]:
    if path in WORDS:
        yield from _word(path, value)
    elif isinstance(value, int | float) and not isinstance(value, bool) and not RANGES[path].holds(value):
        fix = RANGES[path].fix or f"write {path}=VALUE with one in that range"
        yield Violation(path, f"{path} is {value:g}; it is {RANGES[path]}", fix)


def _word(path: str, value: Any) -> Iterator[Violation]:
    known = WORDS[path]
    for word in value if isinstance(value, list | tuple) else [value]:
        if isinstance(word, enum.Enum):  # Megatron's: a word is the name of some members, and the value of others
            if not {word.name, str(word.value)} & set(known):
                word = word.name
            else:
                continue
        if word is None or str(word) in known:
            continue
        if isinstance(word, str | int):
            near = INSTEAD.get(str(word)) or did_you_mean(str(word), list(known)) or f"write one of {', '.join(known)}"
            yield Violation(path, f"{path} is {word!r}; it takes {', '.join(known)}", near)
