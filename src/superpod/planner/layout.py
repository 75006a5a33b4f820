"""`Layout`: parallel degrees, batch sizes, recomputation and sharding of a run. `rules.py` checks if it is legal."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from superpod.errors import UserError, did_you_mean
from superpod.planner.rules import rules
from superpod.planner.rules.rules import MODULES, RuleInputs, Violation, bits

Recompute = Literal["none", "selective", "full"]
RecomputeMethod = Literal["uniform", "block"]
Sharding = Literal["none", "zero1", "zero2", "zero3"]
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)
"""In the order of ZeRO stages, so that the index is the stage."""
MEGATRON_FSDP: tuple[Sharding, ...] = ("zero2", "zero3")
"""Shardings implemented by Megatron-FSDP; the others use the distributed optimizer or plain data parallelism."""
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
METHODS: tuple[RecomputeMethod, ...] = get_args(RecomputeMethod)
CHOICES: dict[str, tuple[str, ...]] = {"recompute": RECOMPUTES, "recompute_method": METHODS, "sharding": SHARDINGS}
MAX_SIZE = 2**24
"""Maximum value of a field; a larger one is a typo."""
PARALLEL_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
"""Parallel degree -> its name in Megatron."""


@dataclass(frozen=True)
class Layout:
    """Parallel degrees and batch sizes of one training run. The data-parallel size follows from the number of GPUs.

    The names are Megatron's usual abbreviations; `nemo2/build/layout.py` sets the corresponding fields of the strategy.
    """

    tp: int = 1
    """tensor_model_parallel_size"""
    pp: int = 1
    """pipeline_model_parallel_size"""
    vp: int | None = None
    """virtual_pipeline_model_parallel_size: model chunks per pipeline rank; None = not interleaved"""
    cp: int = 1
    """context_parallel_size"""
    ep: int = 1
    """expert_model_parallel_size"""
    etp: int | None = None
    """expert_tensor_parallel_size; None = Megatron's default, tp"""
    sp: bool = False
    """sequence_parallel: activations outside tensor-parallel regions are also split over tp"""
    mbs: int = 1
    """micro-batch size, samples"""
    gbs: int = 1
    """global batch size, samples"""
    embedding_as_layer: bool = False
    """account_for_embedding_in_pipeline_split: the first stage has one fewer transformer layer"""
    loss_as_layer: bool = False
    """account_for_loss_in_pipeline_split: the last stage has one fewer transformer layer"""
    first_layers: int | None = None
    """num_layers_in_first_pipeline_stage; None = same as the other stages"""
    last_layers: int | None = None
    """num_layers_in_last_pipeline_stage"""
    chunks: tuple[int, ...] | None = None
    """pipeline_model_parallel_layout: layers of each of the pp x vp chunks in the order of the model; None = even"""
    recompute: Recompute = "none"
    """activation recomputation, Megatron's recompute_granularity"""
    recompute_method: RecomputeMethod = "uniform"
    """with full recomputation: uniform = all, in groups of recompute_layers; block = recompute_layers per chunk"""
    recompute_layers: int = 1
    """recompute_num_layers, with full recomputation"""
    recompute_modules: tuple[str, ...] = ("core_attn",)
    """with selective recomputation: the recomputed modules, a subset of `MODULES`"""
    sharding: Sharding = "zero1"
    """what data parallelism shards: zero1 = Megatron's distributed optimizer"""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not _DEFAULTS[name]:  # a search creates many layouts, mostly with defaults
                _check_type(name, value)

    @classmethod
    def from_mapping(cls, values: dict[str, Any], where: str) -> Layout:
        """Create a layout from a TOML table; error messages begin with `where` (file and table).

        Raises:
            UserError: a key is unknown, or a value has the wrong type or is not one of the choices.
        """
        values = dict(values)
        for key in values:
            if key not in _DEFAULTS:
                raise UserError(f"{where}: there is no layout key {key!r}", did_you_mean(key, list(_DEFAULTS)))
            if key in TUPLES:
                values[key] = TUPLES[key](values[key], where)
            elif values[key] is None:  # the default of some fields, but not a value in a table
                raise UserError(f"{where}: {key} must have a value, not None")
        if values.get("vp") == 1:  # a single chunk per rank is not interleaved
            values["vp"] = None
        try:
            return cls(**values)
        except UserError as wrong:
            raise UserError(f"{where}: {wrong}", wrong.hint) from wrong

    @property
    def model_parallel(self) -> int:
        """Number of GPUs per model replica: tp x pp x cp."""
        return self.tp * self.pp * self.cp

    def dp(self, world: int) -> int:
        """Return the data-parallel size on `world` GPUs.

        Raises:
            UserError: tp x pp x cp does not divide the number of GPUs.
        """
        if world % self.model_parallel:
            raise UserError(*rules.explain_world_size(self.rule_inputs(world)))
        return world // self.model_parallel

    def micro_batches(self, world: int) -> int:
        """Return the number of micro-batches per step on each data-parallel rank."""
        return self.gbs // (self.mbs * self.dp(world))

    @property
    def modules(self) -> int:
        """Modules of selective recomputation as a bit mask (`rules.bits`); 0 with full or no recomputation."""
        return bits(self.recompute_modules) if self.recompute == "selective" else 0

    @property
    def is_uneven(self) -> bool:
        """Whether a field partitions the layers unevenly, or counts the embedding or the loss as a layer."""
        has_ends = self.first_layers is not None or self.last_layers is not None
        return has_ends or self.embedding_as_layer or self.loss_as_layer or self.chunks is not None

    def short(self) -> str:
        """Format the parallel degrees above 1, such as `TP4 PP4 VP5 CP2 SP`."""
        degrees = {"TP": self.tp, "PP": self.pp, "VP": self.vp or 1, "CP": self.cp, "EP": self.ep, "ETP": self.etp or 1}
        parts = [f"{name}{size}" for name, size in degrees.items() if size > 1]
        if self.sp:
            parts.append("SP")
        return " ".join(parts) or "DP only"

    def replace(self, **changes: Any) -> Layout:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    def rule_inputs(self, world: int) -> RuleInputs:
        """Return the values that the rules of `rules.py` check, for this layout on `world` GPUs."""
        return RuleInputs(
            gpus=world,
            **{name: getattr(self, name) for name in ("tp", "pp", "cp", "ep", "sp", "mbs", "gbs", "recompute_layers")},
            vp=self.vp or 1,
            interleaved=self.vp is not None,
            etp=self.tp if self.etp is None else self.etp,
            recompute=RECOMPUTES.index(self.recompute),
            recompute_block=self.recompute_method == "block",
            modules=self.modules,
            sharding=SHARDINGS.index(self.sharding),
        )

    def below_one(self) -> list[Violation]:
        """Return a violation for every degree and size below 1; all other rules assume values of at least 1."""
        return [
            Violation("positive", f"{name} must be at least 1, not {value}", f"set {name} 1")
            for name, value in vars(self).items()
            if type(value) is int and value < 1
        ]

    def violations(self, world: int) -> list[tuple[str, str]]:
        """Return (message, fix) of each model-independent rule that the layout violates on `world` GPUs.

        `legality.violations` checks a complete job.
        """
        broken_rules = self.below_one() or rules.check_layout(self.rule_inputs(world))
        return [(broken.message, broken.fix) for broken in broken_rules]


def _check_type(name: str, value: object) -> None:
    """Raise UserError if the value of a field has the wrong type; `rules.py` checks whether the layout is legal."""
    default = _DEFAULTS[name]
    if name in TUPLES:
        if value is not None or default is not None:
            TUPLES[name](value, "layout")
    elif name in CHOICES:
        if not isinstance(value, str) or value not in CHOICES[name]:
            raise UserError(f"{name} must be one of {', '.join(CHOICES[name])}, not {value!r}")
    elif not (value is None and default is None) and type(value) is not type(0 if default is None else default):
        raise UserError(f"{name} must be {_describe_type(0 if default is None else default)}, not {value!r}")
    elif type(value) is int and abs(value) > MAX_SIZE:
        raise UserError(f"{name} must be at most {MAX_SIZE:,}, not {value}")


def _check_modules(value: object, where: str) -> tuple[str, ...]:
    """Return a list of recomputed modules as a tuple. Raises UserError if it is empty or invalid."""
    if not isinstance(value, (list, tuple)) or not value or any(name not in MODULES for name in value):
        raise UserError(f"{where}: recompute_modules must be a list of values from {', '.join(MODULES)}, not {value!r}")
    return tuple(value)


def _check_chunks(value: object, where: str) -> tuple[int, ...]:
    """Return a list of layers per chunk as a tuple. Raises UserError if it is empty or invalid."""
    if not isinstance(value, (list, tuple)) or not value or not all(type(v) is int and v >= 0 for v in value):
        raise UserError(f"{where}: chunks must be a list with the number of layers of each chunk, not {value!r}")
    return tuple(value)


TUPLES = {"recompute_modules": _check_modules, "chunks": _check_chunks}


def _describe_type(value: object) -> str:
    """Return the type of a field's default, for messages."""
    return {bool: "true or false", int: "an integer", str: "a string"}[type(value)]


_DEFAULTS = {f.name: f.default for f in fields(Layout)}
