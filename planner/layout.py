"""How a model is spread over GPUs: one frozen `Layout`, and the one place that says whether it is legal."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from superpod.planner.errors import UserError, did_you_mean

Recompute = Literal["none", "selective", "full"]
RecomputeMethod = Literal["uniform", "block"]
Sharding = Literal["none", "zero1", "zero2", "zero3"]
CHOICES = {
    "recompute": get_args(Recompute),
    "recompute_method": get_args(RecomputeMethod),
    "sharding": get_args(Sharding),
}
MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
"""What selective recomputation can recompute (megatron-core 0.15.3, `TransformerConfig.recompute_modules`)."""


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism and batch of one training run. Data parallelism is what the world leaves over.

    Names are Megatron's usual short ones; `recipes/from_layout.py` spells them out for the strategy.
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

    @classmethod
    def from_mapping(cls, values: dict[str, Any], where: str) -> Layout:
        """A layout from a TOML table; `where` (file and table) opens the message when a key is unknown.

        Raises:
            UserError: on an unknown key, or a value that is not of the field's type.
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
                raise UserError(f"{where}: {key} takes {_kind(default)}, not {value!r}")
            if value not in CHOICES.get(key, (value,)):
                raise UserError(f"{where}: {key} is one of {', '.join(CHOICES[key])}, not {value!r}")
        return cls(**values)

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
            raise UserError(*self._world_rule(world))
        return world // self.model_parallel

    def micro_batches(self, world: int) -> int:
        """Micro-batches each data-parallel rank runs per step."""
        return self.gbs // (self.mbs * self.dp(world))

    def short(self) -> str:
        """`TP4 PP4 VP5 CP2 SP`: the degrees above 1, as the field writes them."""
        degrees = {"TP": self.tp, "PP": self.pp, "VP": self.vp or 1, "CP": self.cp, "EP": self.ep, "ETP": self.etp or 1}
        words = [f"{name}{size}" for name, size in degrees.items() if size > 1] + ["SP"] * self.sp
        return " ".join(words) or "DP only"

    def replace(self, **changes: Any) -> Layout:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def _world_rule(self, world: int) -> tuple[str, str]:
        unit = self.model_parallel
        nearest = sorted({max(unit, world // unit * unit), (world // unit + 1) * unit})
        return (
            f"tp {self.tp} x pp {self.pp} x cp {self.cp} = {unit} must divide the number of GPUs, which is {world}",
            f"nearest sizes: {' or '.join(map(str, nearest))} GPUs",
        )

    def violations(self, world: int) -> list[tuple[str, str]]:
        """Every rule that this layout breaks on `world` GPUs, as (rule with its numbers, next move)."""
        degrees = {name: value for name, value in vars(self).items() if type(value) is int}
        if wrong := [(f"{name} must be 1 or more, not {value}", "") for name, value in degrees.items() if value < 1]:
            return wrong
        found = []
        if self.sp and self.tp == 1:
            found.append(
                ("sequence parallelism (sp) splits over tensor parallelism, and tp is 1", "drop sp, or set tp 2")
            )
        if self.vp is not None and self.pp == 1:
            found.append((f"vp {self.vp} interleaves pipeline stages, and pp is 1", "drop vp, or set pp 4"))
        if world % self.model_parallel:
            return [*found, self._world_rule(world)]
        dp = self.dp(world)
        if self.gbs % (self.mbs * dp):
            step = self.mbs * dp
            near = sorted({max(step, self.gbs // step * step), (self.gbs // step + 1) * step})
            found.append(
                (
                    f"gbs {self.gbs} must be a multiple of mbs {self.mbs} x dp {dp} = {step}",
                    f"nearest: gbs {' or '.join(map(str, near))}",
                )
            )
        elif self.vp is not None and self.pp > 1 and (self.gbs // (self.mbs * dp)) % self.pp:
            count = self.gbs // (self.mbs * dp)
            found.append(
                (
                    f"with vp, the micro-batches per step ({self.gbs} / ({self.mbs} x {dp}) = {count}) "
                    f"must be a multiple of pp {self.pp}",
                    f"set gbs {self.mbs * dp * self.pp * max(1, count // self.pp)}",
                )
            )
        etp = self.etp or self.tp
        if (self.tp * self.cp * dp) % (self.ep * etp):
            found.append(
                (
                    f"the expert grid ep {self.ep} x etp {etp} = {self.ep * etp} must divide "
                    f"tp x cp x dp = {self.tp * self.cp * dp}",
                    f"set ep to a divisor of {self.tp * self.cp * dp // etp or 1}",
                )
            )
        return found


def _modules(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not value or not set(value) <= set(MODULES):
        raise UserError(f"{where}: recompute_modules is a list of {', '.join(MODULES)}, not {value!r}")
    return tuple(value)


def _chunks(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not value or not all(type(v) is int and v >= 0 for v in value):
        raise UserError(f"{where}: chunks is a list of numbers of layers, not {value!r}")
    return tuple(value)


TUPLES = {"recompute_modules": _modules, "chunks": _chunks}


def _kind(value: object) -> str:
    return {bool: "true or false", int: "a whole number", str: "a string"}[type(value)]
