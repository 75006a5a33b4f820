"""`Layout`: parallel degrees, batch sizes, recomputation and sharding of a run. `rules.py` decides if it is legal."""

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
"""Implemented by Megatron-FSDP; the others by the distributed optimizer and plain data parallelism."""
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
METHODS: tuple[RecomputeMethod, ...] = get_args(RecomputeMethod)
CHOICES: dict[str, tuple[str, ...]] = {"recompute": RECOMPUTES, "recompute_method": METHODS, "sharding": SHARDINGS}
MOST = 2**24
"""Largest size; anything larger is a typing error."""
PARALLEL_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
"""Megatron's names of the parallel degrees."""


@dataclass(frozen=True)
class Layout:
    """Parallel degrees and batch sizes of one training run. The data-parallel size follows from the number of GPUs.

    Names are Megatron's usual short ones; `nemo2/build/layout.py` spells them out for the strategy.
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
    """sequence_parallel: the activations outside tensor-parallel regions are split over tp too"""
    mbs: int = 1
    """micro-batch size, samples"""
    gbs: int = 1
    """global batch size, samples"""
    embedding_as_layer: bool = False
    """account_for_embedding_in_pipeline_split: the first stage has one transformer layer less"""
    loss_as_layer: bool = False
    """account_for_loss_in_pipeline_split: the last stage has one transformer layer less"""
    first_layers: int | None = None
    """num_layers_in_first_pipeline_stage; None = as many as the others"""
    last_layers: int | None = None
    """num_layers_in_last_pipeline_stage"""
    chunks: tuple[int, ...] | None = None
    """pipeline_model_parallel_layout: layers of each of the pp x vp chunks in the order of the model; None = even"""
    recompute: Recompute = "none"
    """activation recomputation, Megatron's recompute_granularity"""
    recompute_method: RecomputeMethod = "uniform"
    """with full recomputation: uniform = every layer, kept in groups of recompute_layers; block = so many per chunk"""
    recompute_layers: int = 1
    """recompute_num_layers, with full recomputation"""
    recompute_modules: tuple[str, ...] = ("core_attn",)
    """with selective recomputation: of `MODULES`"""
    sharding: Sharding = "zero1"
    """what data parallelism shards: zero1 = Megatron's distributed optimizer"""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not _DEFAULTS[name]:  # a search makes many layouts, mostly of defaults
                _check_type(name, value)

    @classmethod
    def from_mapping(cls, values: dict[str, Any], where: str) -> Layout:
        """Create a layout from a TOML table; `where` (file and table) opens error messages.

        Raises:
            UserError: a key is unknown, or a value does not have the field's type.
        """
        known = {f.name: f.default for f in fields(cls)}
        for key, value in values.items():
            if key not in known:
                raise UserError(f"{where}: no layout key is called {key!r}", did_you_mean(key, list(known)))
            default = 0 if known[key] is None else known[key]
            if key in TUPLES:
                values = values | {key: TUPLES[key](value, where)}
                continue
            if type(value) is not type(default):
                raise UserError(f"{where}: {key} must be {_kind(default)}, not {value!r}")
            if value not in CHOICES.get(key, (value,)):
                raise UserError(f"{where}: {key} must be one of {', '.join(CHOICES[key])}, not {value!r}")
        if values.get("vp") == 1:  # a single chunk per rank is not interleaved
            values = values | {"vp": None}
        try:
            return cls(**values)
        except UserError as wrong:
            raise UserError(f"{where}: {wrong}", wrong.hint) from wrong

    @property
    def model_parallel(self) -> int:
        """GPUs that hold one copy of the model: tp x pp x cp."""
        return self.tp * self.pp * self.cp

    def dp(self, world: int) -> int:
        """Data-parallel size on `world` GPUs.

        Raises:
            UserError: when tp x pp x cp does not divide the world.
        """
        if world % self.model_parallel:
            raise UserError(*rules.world(self.rule_inputs(world)))
        return world // self.model_parallel

    def micro_batches(self, world: int) -> int:
        """Micro-batches each data-parallel rank runs per step."""
        return self.gbs // (self.mbs * self.dp(world))

    @property
    def modules(self) -> int:
        """Selective recomputation's modules as bits (`rules.bits`); 0 with another granularity."""
        return bits(self.recompute_modules) if self.recompute == "selective" else 0

    def short(self) -> str:
        """Return the degrees above 1, such as `TP4 PP4 VP5 CP2 SP`."""
        degrees = {"TP": self.tp, "PP": self.pp, "VP": self.vp or 1, "CP": self.cp, "EP": self.ep, "ETP": self.etp or 1}
        parts = [f"{name}{size}" for name, size in degrees.items() if size > 1]
        if self.sp:
            parts.append("SP")
        return " ".join(parts) or "DP only"

    def replace(self, **changes: Any) -> Layout:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def rule_inputs(self, world: int) -> RuleInputs:
        """Return this layout on `world` GPUs as the input of `rules.py`."""
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
        """Return a violation for every degree and size below 1; the other rules assume that there is none."""
        return [
            Violation("positive", f"{name} must be 1 or more, not {value}", f"set {name} 1")
            for name, value in vars(self).items()
            if type(value) is int and value < 1
        ]

    def violations(self, world: int) -> list[tuple[str, str]]:
        """Return (message, fix) of every rule that this layout breaks on `world` GPUs with any model.

        `legality.violations` checks the complete job.
        """
        broken_rules = self.below_one() or rules.check_layout(self.rule_inputs(world))
        return [(broken.message, broken.fix) for broken in broken_rules]


def _check_type(name: str, value: object) -> None:
    """Raise UserError if the value does not have the field's type; `rules.py` checks what is legal."""
    default = _DEFAULTS[name]
    if name in TUPLES:
        if value is not None or default is not None:
            TUPLES[name](value, "layout")
    elif name in CHOICES:
        if not isinstance(value, str) or value not in CHOICES[name]:
            raise UserError(f"{name} must be one of {', '.join(CHOICES[name])}, not {value!r}")
    elif type(value) is int and abs(value) > MOST:
        raise UserError(f"{name} must be at most {MOST:,}, not {value}")
    elif not (value is None and default is None) and type(value) is not type(0 if default is None else default):
        raise UserError(f"{name} must be {_kind(0 if default is None else default)}, not {value!r}")


def _modules(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not value or any(name not in MODULES for name in value):
        raise UserError(f"{where}: recompute_modules must be a list of {', '.join(MODULES)}, not {value!r}")
    return tuple(value)


def _chunks(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not value or not all(type(v) is int and v >= 0 for v in value):
        raise UserError(f"{where}: chunks must be a list of numbers of layers, not {value!r}")
    return tuple(value)


TUPLES = {"recompute_modules": _modules, "chunks": _chunks}


def _kind(value: object) -> str:
    return {bool: "true or false", int: "an integer", str: "a string"}[type(value)]


_DEFAULTS = {f.name: f.default for f in fields(Layout)}
