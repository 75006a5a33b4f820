"""Define the rules for legal layouts, which are evaluated on integers or on numpy arrays of many layouts.

The rules in `LAYOUT` need the layout and the number of GPUs (`Layout.violations`), those in `MODEL` also the model
(`models.counts`), those in `job_rules.py` the complete job; `legality.py` checks all of them. Each rule is defined
once. Comments name its source in megatron-core 0.15.3; tests/planner/test_legality_megatron.py compares them.
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
    """Return modules as a bit mask: bit i = `MODULES[i]`."""
    return sum(1 << MODULES.index(name) for name in modules)


class Violation(NamedTuple):
    """A violated rule: its name, a message with the numbers, and the nearest legal change."""

    rule: str
    message: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class RuleInputs:
    """The layout and the number of GPUs that a rule checks: integers, or numpy arrays that broadcast."""

    gpus: Integer = 1
    tp: Integer = 1
    pp: Integer = 1
    vp: Integer = 1
    """1 = not interleaved."""
    interleaved: Boolean = False
    """Whether vp is set; in arrays, whether vp > 1."""
    cp: Integer = 1
    ep: Integer = 1
    etp: Integer = 1
    """tp, Megatron's default, if the layout does not set it."""
    sp: Boolean = False
    mbs: Integer = 1
    gbs: Integer = 1
    microbatch_group: int = 0
    """microbatch_group_size_per_vp_stage of the interleaved schedule; 0 = pp."""
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
        """Number of GPUs per model replica."""
        return self.tp * self.pp * self.cp

    @cached_property
    def dp(self) -> Integer:
        """Data-parallel size; at least 1, so that rules can be evaluated for an indivisible world size."""
        dp = self.gpus // self.model_parallel
        return dp + (dp == 0)

    @cached_property
    def step(self) -> Integer:
        """Samples per micro-batch over all data-parallel ranks, mbs x dp; gbs must be a multiple of it."""
        return self.mbs * self.dp

    @cached_property
    def micro_batches(self) -> Integer:
        """Number of micro-batches per step on each data-parallel rank."""
        return self.gbs // self.step

    @property
    def ranks_per_stage(self) -> Integer:
        """Number of GPUs per pipeline stage: tp x cp x dp."""
        return self.tp * self.cp * self.dp

    def recomputes(self, *names: str) -> Boolean:
        """Return whether selective recomputation includes one of the modules `names`."""
        return (self.modules & bits(names)) != 0


@dataclass(frozen=True, kw_only=True)
class ModelInputs(RuleInputs):
    """The layout, the number of GPUs and the model that a rule checks."""

    model: ModelShape
    uneven: Boolean = False
    """Whether stages have different numbers of layers."""


@dataclass(frozen=True, kw_only=True)
class JobInputs(ModelInputs):
    """The job that a rule checks, and the partition of its layers into pipeline stages."""

    job: PlannedJob
    both_ends: Boolean = False
    """Whether first_layers and last_layers are both set."""
    unpartitionable: Boolean = False
    """Whether the layers cannot be partitioned as the layout specifies."""
    why_unpartitionable: tuple[str, str] = ("", "")
    """(message, fix) if they cannot be partitioned."""
    last_empty: Boolean = False
    """Whether the last model chunk has no transformer layer, only the head or multi-token prediction."""
    chunk_sizes: tuple[Integer, ...] = ()
    """The distinct numbers of layers of the model chunks."""


Inputs = TypeVar("Inputs", bound=RuleInputs, contravariant=True)


@dataclass(frozen=True)
class Rule(Generic[Inputs]):
    """A rule for a layout, a layout and its model, or a complete job."""

    name: str
    is_broken: Callable[[Inputs], Boolean]
    """Whether the inputs violate the rule, for one layout or for many."""
    explain: Callable[[Inputs], tuple[str, str]]
    """Returns (message, nearest legal change) for one layout that violates the rule."""


def check(rules: Iterable[Rule[Inputs]], inputs: Inputs) -> list[Violation]:
    """Return the violations of `rules` by one layout."""
    return [Violation(rule.name, *rule.explain(inputs)) for rule in rules if rule.is_broken(inputs)]


def near_multiples(step: Integer, value: Integer) -> str:
    """Format the positive multiples of `step` below and above `value`, such as `8 or 16`."""
    step, value = int(step), int(value)
    nearest_multiples = sorted({max(step, value // step * step), (value // step + 1) * step})
    return " or ".join(map(str, nearest_multiples))


@lru_cache(2**12)
def near_divisors(size: int, number: int) -> str:
    """Format the divisors of `size` below (or equal to) and above `number`, such as `2 or 4`."""
    divisors = [d for d in range(1, min(size, 4 * number, 10**5) + 1) if size % d == 0]
    lower_divisor = [d for d in divisors if d <= number][-1:]
    upper_divisor = [d for d in divisors if d > number][:1]
    return " or ".join(map(str, lower_divisor + upper_divisor))


def explain_world_size(f: RuleInputs) -> tuple[str, str]:
    """Return (message, fix) for a number of GPUs that is not divisible by tp x pp x cp."""
    unit, gpus = int(f.model_parallel), int(f.gpus)
    node_gpus = 1
    if isinstance(f, JobInputs) and gpus >= f.job.node.gpus:
        node_gpus = f.job.node.gpus

    sizes = "nearest sizes of complete nodes" if node_gpus > 1 else "nearest sizes"
    fix = f"{sizes}: {near_multiples(math.lcm(unit, node_gpus), gpus)} GPUs"
    degrees = {"tp": int(f.tp), "pp": int(f.pp), "cp": int(f.cp)}
    nearest_degrees = [f"{name} {near_divisors(gpus, degree)}" for name, degree in degrees.items() if gpus % degree]
    if nearest_degrees:
        fix = f"nearest: {', '.join(nearest_degrees)}; or {fix}"
    return f"tp {f.tp} x pp {f.pp} x cp {f.cp} = {unit} must divide the number of GPUs, which is {f.gpus}", fix


def _explain_gbs(f: RuleInputs) -> tuple[str, str]:
    return (
        f"gbs {f.gbs} must be a multiple of mbs {f.mbs} x dp {f.dp} = {f.step}",
        f"nearest: gbs {near_multiples(f.step, f.gbs)}",
    )


def _leaves_groups_incomplete(f: RuleInputs) -> Boolean:
    """Return whether the last group of micro-batches of the interleaved schedule has fewer than pp micro-batches."""
    group = f.microbatch_group or f.pp
    remainder = f.micro_batches % group
    return (remainder != 0) & (remainder < f.pp)


def _explain_micro_batches(f: RuleInputs) -> tuple[str, str]:
    return (
        f"with vp, the number of micro-batches per step ({f.gbs} / ({f.mbs} x {f.dp}) = {f.micro_batches}) "
        f"must be a multiple of pp {f.pp}",
        f"set gbs {f.step * f.pp * max(1, int(f.micro_batches // f.pp))}",
    )


def _explain_expert_grid(f: RuleInputs) -> tuple[str, str]:
    ranks, grid = f.ranks_per_stage, f.ep * f.etp
    return (
        f"ep {f.ep} x etp {f.etp} = {grid} must divide tp x cp x dp = {ranks}",
        f"set ep to a divisor of {ranks // f.etp or 1}",
    )


WORLD: Rule[RuleInputs] = Rule("world", lambda f: f.gpus % f.model_parallel != 0, explain_world_size)
"""parallel_state.initialize_model_parallel"""

DEGREES: tuple[Rule[RuleInputs], ...] = (
    Rule(
        "sp",  # ModelParallelConfig.__post_init__
        lambda f: f.sp & (f.tp == 1),
        lambda f: (
            "sequence parallelism (sp) requires tensor parallelism, but tp is 1",
            "disable sp, or set tp 2",
        ),
    ),
    Rule(
        "vp",  # parallel_state.initialize_model_parallel
        lambda f: f.interleaved & (f.pp == 1),
        lambda f: (f"vp {f.vp} requires pipeline parallelism, but pp is 1", "remove vp, or set pp 4"),
    ),
    Rule(
        "vp_of_one",  # a NameError on the last rank with overlap_p2p_comm; mismatched sends with pp 2 without it
        lambda f: f.interleaved & (f.vp == 1) & (f.pp > 1),
        lambda f: ("Megatron's interleaved schedule does not support a single chunk per rank (vp 1)", "remove vp"),
    ),
)
"""Rules for the parallel degrees alone."""

BATCH: tuple[Rule[RuleInputs], ...] = (
    Rule("gbs", lambda f: f.gbs % f.step != 0, _explain_gbs),  # num_microbatches_calculator
    Rule(
        "micro_batches",  # schedules.forward_backward_pipelining_with_interleaving, microbatch_group_size_per_vp_stage
        lambda f: f.interleaved & (f.pp > 1) & (f.gbs % f.step == 0) & _leaves_groups_incomplete(f),
        _explain_micro_batches,
    ),
    Rule("expert_grid", lambda f: f.ranks_per_stage % (f.ep * f.etp) != 0, _explain_expert_grid),  # parallel_state
)
"""Rules that need the data-parallel size, which exists only if tp x pp x cp divides the world size."""

LAYOUT = (*DEGREES, WORLD, *BATCH)
"""All rules for a layout and its number of GPUs."""


def check_layout(inputs: RuleInputs) -> list[Violation]:
    """Return the violations of `LAYOUT`; `BATCH` is checked only if tp x pp x cp divides the number of GPUs."""
    violations = check((*DEGREES, WORLD), inputs)
    if violations and violations[-1].rule == WORLD.name:
        return violations
    return violations + check(BATCH, inputs)


def _divisibility_rule(
    name: str, read_size: Callable[[ModelShape], int], by: str, block: str = ""
) -> Rule[ModelInputs]:
    """Create a rule that a degree divides a size of the model.

    Args:
        name: the size, for messages.
        read_size: reads it from a model; 0 = the rule does not apply.
        by: the degree, such as `tp`.
        block: the kind of block without which the rule does not apply; "" = every model.
    """

    def get_size(m: ModelShape) -> int:
        return read_size(m) if not block or block in m.kinds else 0

    def explain(f: ModelInputs) -> tuple[str, str]:
        size, degree = get_size(f.model), getattr(f, by)
        return f"{name} {size} must be divisible by {by} {degree}", f"nearest: {by} {near_divisors(size, degree)}"

    return Rule(name, lambda f: get_size(f.model) % getattr(f, by) != 0, explain)


MODEL: tuple[Rule[ModelInputs], ...] = (
    # TransformerConfig.__post_init__, for every model
    _divisibility_rule("heads", lambda m: m.heads, "tp"),
    _divisibility_rule("kv_heads", lambda m: 0 if m.kv_lora else m.groups, "tp"),
    # ensure_divisibility in tensor_parallel.layers: column- and row-parallel layers, the vocabulary
    _divisibility_rule("ffn", lambda m: m.ffn, "tp", "mlp"),
    _divisibility_rule("expert_ffn", lambda m: m.expert_ffn, "etp", "moe"),
    _divisibility_rule("shared_ffn", lambda m: m.shared_ffn, "tp", "moe"),
    _divisibility_rule("vocab", lambda m: m.vocab if m.vocab_divisible_by == 1 else 0, "tp"),
    _divisibility_rule(
        "hidden", lambda m: m.hidden if m.mtp_layers else 0, "tp"
    ),  # eh_proj of MultiTokenPredictionLayer
    _divisibility_rule("experts", lambda m: m.experts, "ep", "moe"),  # BaseMoELayer
    _divisibility_rule("mamba_heads", lambda m: m.mamba_heads, "tp", "mamba"),  # MambaMixer
    _divisibility_rule("mamba_groups", lambda m: m.mamba_groups, "tp", "mamba"),
    _divisibility_rule("delta_key_heads", lambda m: m.delta_key_heads, "tp", "delta"),
    Rule(
        "hybrid_stages",  # MambaStack._select_layers_for_pipeline_parallel
        lambda f: (f.interleaved | f.uneven) & bool(f.model.pattern),
        lambda f: (
            "Megatron supports neither virtual stages nor uneven stages for hybrid models",
            "remove vp and uneven stages",
        ),
    ),
    Rule(
        "runs_stages",  # NeMo 2.7.3, heterogeneous_layer_spec does not pass vp_stage, which Megatron asserts
        lambda f: f.interleaved & bool(f.model.runs),
        lambda f: ("NeMo does not support virtual stages for models with heterogeneous layers", "remove vp"),
    ),
    Rule(
        "no_experts",  # TransformerConfig.__post_init__
        lambda f: (f.ep > 1) & (not f.model.experts),
        lambda f: (f"ep {f.ep} requires a mixture of experts, but this model is dense", "set ep 1"),
    ),
    Rule(
        "expert_bias",  # TransformerConfig.__post_init__
        lambda f: (f.etp > 1) & bool(f.model.experts and f.model.bias),
        lambda f: (f"experts with biases require etp 1, but etp is {f.etp}", "set etp 1"),
    ),
)
"""Rules for a layout and its model: sizes that the degrees must divide, and features that they exclude."""
