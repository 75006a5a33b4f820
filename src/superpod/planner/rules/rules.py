"""The rules that make a layout legal, as tables: arithmetic on whole numbers, or on numpy arrays of many layouts.

`LAYOUT` needs only the layout and the number of GPUs (`Layout.violations`), `MODEL` the model as well
(`models.counts.problems`), `job_rules.py` the whole job; `legality.py` checks all of them. No rule stands twice.
Comments name the source in megatron-core 0.15.3; tests/planner/test_legality_megatron.py builds it and compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from superpod.planner.arrays import Boolean, Integer
    from superpod.planner.models import ModelShape
    from superpod.planner.planned_job import PlannedJob


MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
"""Modules of selective recomputation (megatron-core 0.15.3, `TransformerConfig.recompute_modules`)."""


def bits(modules: Iterable[str]) -> int:
    """Modules as a mask: bit i = `MODULES[i]`."""
    return sum(1 << MODULES.index(name) for name in modules)


class Violation(NamedTuple):
    """A rule that a job breaks: which one, with the numbers that break it, and the nearest legal change."""

    rule: str
    message: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class RuleInputs:
    """A layout on so many GPUs, as rules read it: one layout, or many as numpy arrays that broadcast."""

    gpus: Integer = 1
    tp: Integer = 1
    pp: Integer = 1
    vp: Integer = 1
    """1 = not interleaved."""
    interleaved: Boolean = False
    """A vp is given. In arrays: it is above 1."""
    cp: Integer = 1
    ep: Integer = 1
    etp: Integer = 1
    """Never None: Megatron's default is filled in."""
    sp: Boolean = False
    mbs: Integer = 1
    gbs: Integer = 1
    microbatch_group: int = 0
    """Micro-batches that pass a chunk before the next chunk's turn, when interleaved; 0 = pp."""
    recompute: Integer = 0
    """0 none, 1 selective, 2 full."""
    recompute_block: Boolean = False
    recompute_layers: Integer = 1
    modules: Integer = 0
    """Bit i = `MODULES[i]` is recomputed; 0 unless selective."""
    sharding: Integer = 1
    """ZeRO stage."""

    @property
    def model_parallel(self) -> Integer:
        """GPUs that hold one copy of the model."""
        return self.tp * self.pp * self.cp

    @cached_property
    def dp(self) -> Integer:
        """Data-parallel size; at least 1, so that rules about it have an answer where the world does not divide."""
        dp = self.gpus // self.model_parallel
        return dp + (dp == 0)

    @cached_property
    def step(self) -> Integer:
        """Samples of one micro-batch on every data-parallel rank."""
        return self.mbs * self.dp

    @cached_property
    def micro_batches(self) -> Integer:
        """Micro-batches of each data-parallel rank per step."""
        return self.gbs // self.step

    @property
    def ranks_per_stage(self) -> Integer:
        """GPUs of one pipeline rank: the dense grid's tp x cp x dp."""
        return self.tp * self.cp * self.dp

    def recomputes(self, *names: str) -> Boolean:
        """Whether selective recomputation takes one of these modules."""
        return (self.modules & bits(names)) != 0


@dataclass(frozen=True, kw_only=True)
class ModelInputs(RuleInputs):
    """A layout and the model that it divides."""

    model: ModelShape
    uneven: Boolean = False
    """Some stage gets another number of layers than the others."""


@dataclass(frozen=True, kw_only=True)
class JobInputs(ModelInputs):
    """A job, and how its layers are partitioned into pipeline stages."""

    job: PlannedJob
    both_ends: Boolean = False
    """The layers of the first and of the last stage are given."""
    unpartitionable: Boolean = False
    """The layers cannot be partitioned as the layout asks."""
    why_unpartitionable: tuple[str, str] = ("", "")
    last_empty: Boolean = False
    """The last model chunk has no layer: a head, or multi-token prediction, stands alone."""
    chunk_sizes: tuple[Integer, ...] = ()
    """Layers of the model chunks, each size once."""


Inputs = TypeVar("Inputs", bound=RuleInputs, contravariant=True)


@dataclass(frozen=True)
class Rule(Generic[Inputs]):
    """One rule, over the inputs that it needs: of a layout, of a layout and its model, or of a whole job."""

    name: str
    broken: Callable[[Inputs], Boolean]
    """Whether the inputs break it, for one layout or for many."""
    says: Callable[[Inputs], tuple[str, str]]
    """For one layout that breaks it: (rule with its numbers, nearest legal change)."""


def check(rules: Iterable[Rule[Inputs]], inputs: Inputs) -> list[Violation]:
    """The rules of a table that one layout breaks."""
    return [Violation(rule.name, *rule.says(inputs)) for rule in rules if rule.broken(inputs)]


def near_multiples(step: Integer, value: Integer) -> str:
    """The multiples of `step` on both sides of a value."""
    step, value = int(step), int(value)
    near = sorted({max(step, value // step * step), (value // step + 1) * step})
    return " or ".join(map(str, near))


@lru_cache(2**12)
def near_divisors(size: int, wanted: int) -> str:
    """The divisors of `size` on both sides of a number."""
    divisors = [d for d in range(1, min(size, 4 * wanted, 10**5) + 1) if size % d == 0]
    below = [d for d in divisors if d <= wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return " or ".join(map(str, below + above))


def world(f: RuleInputs) -> tuple[str, str]:
    """The message of a number of GPUs that tp x pp x cp does not divide."""
    unit, gpus = int(f.model_parallel), int(f.gpus)
    node = f.job.node.gpus if isinstance(f, JobInputs) and gpus >= f.job.node.gpus else 1
    degrees = {"tp": int(f.tp), "pp": int(f.pp), "cp": int(f.cp)}
    odd = [f"{name} {near_divisors(gpus, degree)}" for name, degree in degrees.items() if gpus % degree]
    sizes = f"nearest sizes{' of whole nodes' * (node > 1)}: {near_multiples(math.lcm(unit, node), gpus)} GPUs"
    return (
        f"tp {f.tp} x pp {f.pp} x cp {f.cp} = {unit} must divide the number of GPUs, which is {f.gpus}",
        f"nearest: {', '.join(odd)}; or {sizes}" if odd else sizes,
    )


def _batch(f: RuleInputs) -> tuple[str, str]:
    return (
        f"gbs {f.gbs} must be a multiple of mbs {f.mbs} x dp {f.dp} = {f.step}",
        f"nearest: gbs {near_multiples(f.step, f.gbs)}",
    )


def _breaks_groups(f: RuleInputs) -> Boolean:
    """Whether the last group of micro-batches is too short to fill the pipeline."""
    group = f.microbatch_group or f.pp
    rest = f.micro_batches % group
    return (rest != 0) & (rest < f.pp)


def _micro_batches(f: RuleInputs) -> tuple[str, str]:
    return (
        f"with vp, the micro-batches per step ({f.gbs} / ({f.mbs} x {f.dp}) = {f.micro_batches}) "
        f"must be a multiple of pp {f.pp}",
        f"set gbs {f.step * f.pp * max(1, int(f.micro_batches // f.pp))}",
    )


def _expert_grid(f: RuleInputs) -> tuple[str, str]:
    ranks, grid = f.ranks_per_stage, f.ep * f.etp
    return (
        f"the expert grid ep {f.ep} x etp {f.etp} = {grid} must divide tp x cp x dp = {ranks}",
        f"set ep to a divisor of {ranks // f.etp or 1}",
    )


WORLD: Rule[RuleInputs] = Rule("world", lambda f: f.gpus % f.model_parallel != 0, world)
"""parallel_state.initialize_model_parallel"""

DEGREES: tuple[Rule[RuleInputs], ...] = (
    Rule(
        "sp",  # ModelParallelConfig.__post_init__
        lambda f: f.sp & (f.tp == 1),
        lambda f: (
            "sequence parallelism (sp) splits over tensor parallelism, and tp is 1",
            "drop sp, or set tp 2",
        ),
    ),
    Rule(
        "vp",  # parallel_state.initialize_model_parallel
        lambda f: f.interleaved & (f.pp == 1),
        lambda f: (f"vp {f.vp} interleaves pipeline stages, and pp is 1", "drop vp, or set pp 4"),
    ),
    Rule(
        "vp_of_one",  # with overlapped sends the last rank dies of a NameError, with pp 2 and without they cross
        lambda f: f.interleaved & (f.vp == 1) & (f.pp > 1),
        lambda f: ("vp 1 runs the interleaved schedule over single chunks, which Megatron does not mean", "drop vp"),
    ),
)
"""Rules of the degrees alone."""

BATCH: tuple[Rule[RuleInputs], ...] = (
    Rule("gbs", lambda f: f.gbs % f.step != 0, _batch),  # num_microbatches_calculator
    Rule(
        "micro_batches",  # schedules.forward_backward_pipelining_with_interleaving, microbatch_group_size_per_vp_stage
        lambda f: f.interleaved & (f.pp > 1) & (f.gbs % f.step == 0) & _breaks_groups(f),
        _micro_batches,
    ),
    Rule("expert_grid", lambda f: f.ranks_per_stage % (f.ep * f.etp) != 0, _expert_grid),  # parallel_state
)
"""Rules over the data-parallel size, which exists only where tp x pp x cp divides the world."""

LAYOUT = (*DEGREES, WORLD, *BATCH)
"""All rules of a layout on so many GPUs."""


def layout(inputs: RuleInputs) -> list[Violation]:
    """The rules of `LAYOUT` that one layout breaks; those of the batch only where the world divides."""
    of_degrees = check((*DEGREES, WORLD), inputs)
    divides = not of_degrees or of_degrees[-1].rule != WORLD.name
    return of_degrees + (check(BATCH, inputs) if divides else [])


def _divides(name: str, size: Callable[[ModelShape], int], by: str) -> Rule[ModelInputs]:
    """A size (0 = the model has no such part) that a degree must divide."""

    def says(f: ModelInputs) -> tuple[str, str]:
        whole, degree = size(f.model), getattr(f, by)
        return f"{name} {whole} is no multiple of {by} {degree}", f"nearest: {by} {near_divisors(whole, degree)}"

    return Rule(name, lambda f: size(f.model) % getattr(f, by) != 0, says)


def _where(block: str, size: Callable[[ModelShape], int]) -> Callable[[ModelShape], int]:
    return lambda m: size(m) if block in m.kinds else 0


MODEL: tuple[Rule[ModelInputs], ...] = (
    # TransformerConfig.__post_init__, for every model
    _divides("heads", lambda m: m.heads, "tp"),
    _divides("kv_heads", lambda m: 0 if m.kv_lora else m.groups, "tp"),
    # ensure_divisibility in tensor_parallel.layers: column- and row-parallel products, the vocabulary
    _divides("ffn", _where("mlp", lambda m: m.ffn), "tp"),
    _divides("expert_ffn", _where("moe", lambda m: m.expert_ffn), "etp"),
    _divides("shared_ffn", _where("moe", lambda m: m.shared_ffn), "tp"),
    _divides("vocab", lambda m: m.vocab if m.vocab_divisible_by == 1 else 0, "tp"),
    _divides("hidden", lambda m: m.hidden if m.mtp_layers else 0, "tp"),  # eh_proj of MultiTokenPredictionLayer
    _divides("experts", _where("moe", lambda m: m.experts), "ep"),  # BaseMoELayer
    _divides("mamba_heads", _where("mamba", lambda m: m.mamba_heads), "tp"),  # MambaMixer
    _divides("mamba_groups", _where("mamba", lambda m: m.mamba_groups), "tp"),
    _divides("delta_key_heads", _where("delta", lambda m: m.delta_key_heads), "tp"),
    Rule(
        "hybrid_stages",  # MambaStack._select_layers_for_pipeline_parallel
        lambda f: (f.interleaved | f.uneven) & bool(f.model.pattern),
        lambda f: ("Megatron partitions a hybrid's layers evenly, without virtual stages", "drop vp and uneven stages"),
    ),
    Rule(
        "runs_stages",  # NeMo 2.7.3, heterogeneous_layer_spec: it does not pass vp_stage on, and Megatron asserts one
        lambda f: f.interleaved & bool(f.model.runs),
        lambda f: ("NeMo builds layers of different widths without virtual stages", "drop vp"),
    ),
    Rule(
        "no_experts",  # TransformerConfig.__post_init__
        lambda f: (f.ep > 1) & (not f.model.experts),
        lambda f: (f"ep {f.ep} spreads experts, and this model has none", "set ep 1"),
    ),
    Rule(
        "expert_bias",  # TransformerConfig.__post_init__
        lambda f: (f.etp > 1) & bool(f.model.experts and f.model.bias),
        lambda f: (f"experts with biases need etp 1, and etp is {f.etp}", "set etp 1"),
    ),
)
"""How a model divides over tp, pp, vp, ep and etp."""
