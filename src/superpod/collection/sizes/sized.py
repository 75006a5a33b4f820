"""Adapt a recipe to a requested size, sequence length, batch size and layout, declared or not.

The result is a recipe with one size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from superpod.collection.registry import Recipe, find
from superpod.collection.sizes import tune
from superpod.errors import UserError, counted
from superpod.planner import explain, plans
from superpod.planner.layout import Layout
from superpod.planner.models import ModelShape
from superpod.planner.planned_job import PlannedJob
from superpod.planner.rules import rules

MAX_COUNT = 2**24
"""Maximum tokens per sample and samples per batch. Larger values are typos."""
BATCH_TOLERANCE = 0.05
"""Maximum relative difference between the tokens of a legal batch and the requested tokens."""
PLANNED_BATCH_TOLERANCE = 0.02
"""The same before the layout is planned, so that the batch size has many divisors."""
MIN_BATCH_GAIN = 0.1
"""Minimum relative gain in throughput for which another batch size is suggested."""
TOKENS_PER_STEP = "tokens per step"
"""Beginning of the note on the batch size, which `Request.notes` omits if overrides set the batch size."""
BATCH_RULES = ("gbs", "micro_batches")
"""Rules of `planner/rules/rules.py` that depend on the batch size."""

COMMAND_LINE, PLANNED = "command line", "planned now"
"""Origins of values that are not in a layout file."""


@dataclass(frozen=True)
class Size:
    """A requested size; None stands for the declared value, or the smallest declared number of nodes."""

    num_nodes: int | None = None
    seq: int | None = None
    """Sequence length in tokens."""
    gbs: int | None = None
    """Global batch size in samples."""
    batch_tokens: int | None = None
    """Global batch size in tokens, instead of `gbs`. The nearest legal batch size is used."""
    layout: Layout | None = None
    """A complete layout. Its global batch size applies if neither `gbs` nor `batch_tokens` is given."""
    best: bool = False
    """Whether to use the planner's fastest layout, even for a declared size."""
    gpus_per_node: int | None = None
    """Number of GPUs to use on a single node, if not all of them."""


@dataclass(frozen=True)
class SizedRecipe(Recipe):
    """A recipe adapted to one requested size."""

    set_by: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)
    """Field of `Layout`, or `seq` -> origin of its value, unless that is the layout file."""
    planned: bool = False
    """Whether the layout was planned now, so that no model was built or rehearsed with it."""
    notes: tuple[str, ...] = ()
    """Notes for the user, one line each."""

    @property
    def shape(self) -> ModelShape:
        """The model's shape; learned positions cover the complete sequence length."""
        shape = super().shape
        return shape.replace(positions=self.seq) if shape.positions else shape


def adapt(recipe: Recipe, size: Size) -> Recipe:
    """Return a recipe adapted to `size`, or the same object if only a declared size is requested.

    If the size is not declared, its layout is planned. Of a given or declared layout, only the batch size is checked:
    it may be illegal, or not fit.

    Raises:
        UserError: a number is out of range, numbers conflict, the layout does not allow the batch size, the weights do
            not support the sequence length, or no layout fits.
    """
    if size.gpus_per_node == recipe.gpus_per_node:
        size = replace(size, gpus_per_node=None)
    check_size(recipe, size)
    nodes = recipe.nodes[0] if size.num_nodes is None else size.num_nodes
    if size == Size(size.num_nodes) and nodes in recipe.layouts:
        return recipe
    return _adapt(recipe.name, recipe, replace(size, num_nodes=nodes))


@lru_cache(maxsize=256)
def _adapt(name: str, recipe: Recipe, size: Size) -> SizedRecipe:
    """Return the result of `adapt`; cached, because a command needs it several times and a search takes a second."""
    gpus_per_node = size.gpus_per_node or recipe.gpus_per_node
    nodes = size.num_nodes or 0
    longer = replace(recipe, seq=size.seq or recipe.seq, gpus_per_node=gpus_per_node)
    given_layout = size.layout or (None if size.gpus_per_node else recipe.layouts.get(nodes))
    set_by = {"seq": COMMAND_LINE} if longer.seq != recipe.seq else {}

    job = None
    if given_layout is None or size.best:
        gbs = compute_requested_batch(recipe, size)
        job = tune.plan_job(longer, nodes, gbs)
        layout = job.layout
        set_by |= dict.fromkeys((f.name for f in fields(layout)), PLANNED)
    else:
        gbs = _choose_batch(longer, size, given_layout, nodes * gpus_per_node)
        layout = given_layout.replace(gbs=gbs)
        if size.layout:
            set_by |= dict.fromkeys((f.name for f in fields(layout)), COMMAND_LINE)
    if gbs != recipe.layout().gbs:
        set_by["gbs"] = COMMAND_LINE

    values: dict[str, Any] = {f.name: getattr(longer, f.name) for f in fields(Recipe)}
    values["layouts"] = {nodes: layout}
    is_declared = layout == recipe.layouts.get(nodes) and longer.seq == recipe.seq and not size.gpus_per_node
    values["saves"] = {nodes: recipe.saves[nodes]} if is_declared and nodes in recipe.saves else {}
    result = SizedRecipe(**values, set_by=set_by, planned=job is not None)

    notes = _describe_planned_layout(recipe, result)
    if job:
        notes += _suggest_batch_size(longer, nodes, job)
    notes += _describe_tokens_per_step(recipe, result, size)
    return replace(result, notes=tuple(notes))


def split_gpus(recipe: Recipe, gpus: int, nodes: int | None) -> tuple[int, int | None]:
    """Return (nodes, None) for GPUs that fill nodes, or (1, gpus) for a part of one node.

    Raises:
        UserError: `gpus` is not positive, does not fill nodes, or conflicts with the number of nodes `nodes`.
    """
    per_node = recipe.gpus_per_node
    if gpus < 1:
        raise UserError(f"--gpus is {gpus}; it must be at least 1", f"a node of {recipe.name} has {per_node} GPUs")
    if gpus < per_node and nodes in (None, 1):
        return 1, gpus
    if nodes is not None and gpus != nodes * per_node:
        message = f"--gpus {gpus} conflicts with --nodes {nodes} ({per_node} GPUs per node)"
        raise UserError(message, f"use --nodes {nodes} without --gpus")
    if gpus % per_node:
        hint = " or ".join(f"--nodes {n}" for n in (gpus // per_node, gpus // per_node + 1) if n)
        raise UserError(
            f"{gpus} GPUs are not a whole number of nodes: {recipe.name} has {per_node} GPUs per node", hint
        )
    return gpus // per_node, None


def best_layout(recipe: Recipe, nodes: int) -> Layout | None:
    """Return the planner's fastest layout for a recipe on `nodes` nodes, or None if no layout fits."""
    job = tune.best_job(recipe, nodes, recipe.layout(nodes).gbs)
    return job.layout if job else None


# -- the requested size ----------------------------------------------------------------------------------------------


def check_size(recipe: Recipe, size: Size) -> None:
    """Raise UserError if a number is out of range, or conflicts with another number or with the weights."""
    limits = {
        "--nodes": (size.num_nodes, tune.MAX_NODES),
        "--seq": (size.seq, MAX_COUNT),
        "--gbs": (size.gbs, MAX_COUNT),
    }
    for option, (value, maximum) in limits.items():
        if value is not None and not 1 <= value <= maximum:
            message = f"{option} is {value:,}; it must be between 1 and {maximum:,}"
            raise UserError(message, "omit it to use the value from the recipe")
    if size.gpus_per_node is not None:
        per_node = recipe.gpus_per_node
        if not 1 <= size.gpus_per_node < per_node or (size.num_nodes or 1) > 1:
            raise UserError(
                f"{size.gpus_per_node} GPUs are not a part of one node: {recipe.name} has {per_node} GPUs per node",
                f"use 1 to {per_node - 1} GPUs of one node, or --nodes N",
            )
    seq = size.seq or recipe.seq
    if size.batch_tokens is not None and not seq <= size.batch_tokens <= MAX_COUNT * seq:
        raise UserError(
            f"--batch-tokens is {size.batch_tokens:,}; with {seq:,} tokens per sample, it must be between {seq:,} and "
            f"{MAX_COUNT * seq:,}",
            f"pass the number of tokens per global batch, such as --batch-tokens {recipe.layout().gbs * seq}",
        )
    if size.gbs is not None and size.batch_tokens not in (None, size.gbs * seq):
        raise UserError(
            f"--gbs {size.gbs:,} with {seq:,} tokens per sample is {size.gbs * seq:,} tokens, but --batch-tokens is "
            f"{size.batch_tokens:,}",
            "pass only one of them",
        )
    positions = recipe.model.shape.positions
    if recipe.task != "pretrain" and positions and seq != positions:
        raise UserError(
            f"--seq {seq}: the initial weights of {recipe.name} have {positions} learned positions",
            f"use --seq {positions}, or pretrain a model with that many positions",
        )


def _choose_batch(recipe: Recipe, size: Size, layout: Layout, world: int) -> int:
    """Return the requested global batch size, or that of the layout, for `world` GPUs.

    Raises:
        UserError: the layout does not allow the requested size; the hint has the nearest legal sizes.
    """
    if size.gbs is None and size.batch_tokens is None:
        return layout.gbs
    wanted_gbs = float(size.gbs) if size.gbs is not None else (size.batch_tokens or 0) / recipe.seq
    if world % layout.model_parallel:
        return max(1, round(wanted_gbs))  # a rule of the planner rejects the layout later
    below, above = _find_nearest_batches(layout, world, wanted_gbs)
    if below == wanted_gbs:
        return below
    legal = [gbs for gbs in (below, above) if gbs]
    nearest_gbs = min(legal, key=lambda gbs: abs(gbs - wanted_gbs))
    if size.gbs is None and abs(nearest_gbs / wanted_gbs - 1) <= BATCH_TOLERANCE:
        return nearest_gbs
    if size.gbs is None:
        given_text = f"--batch-tokens {size.batch_tokens:,} is {wanted_gbs:,.1f} samples"
    else:
        given_text = f"--gbs {size.gbs:,}"
    unit = f"mbs {layout.mbs} x dp {layout.dp(world)}"
    if layout.vp:
        unit += f" x pp {layout.pp} (interleaved pipeline)"
    raise UserError(
        f"{given_text}: on {world} GPUs with {explain.title(layout)}, the global batch must be a multiple of {unit}",
        " or ".join(f"--gbs {gbs} ({gbs * recipe.seq:,} tokens)" for gbs in legal) + "; or --layout auto",
    )


def _find_nearest_batches(layout: Layout, world: int, target: float) -> tuple[int, int]:
    """Return the nearest legal global batch sizes below (0 if there is none) and above `target`."""
    integer_gbs = int(target)
    if integer_gbs == target:
        violations = rules.check_layout(layout.replace(gbs=integer_gbs).rule_inputs(world))
        if not any(rule.rule in BATCH_RULES for rule in violations):
            return integer_gbs, integer_gbs
    step = layout.mbs * layout.dp(world) * (layout.pp if layout.vp else 1)
    below_gbs = int(target // step) * step
    return below_gbs, below_gbs + step


def compute_requested_batch(recipe: Recipe, size: Size) -> int:
    """Return the global batch size to plan a layout for; a requested number of tokens is rounded to many divisors."""
    if size.gbs is not None:
        return size.gbs
    if size.batch_tokens is None:
        return size.layout.gbs if size.layout else recipe.layout().gbs
    exact_gbs = size.batch_tokens / (size.seq or recipe.seq)
    powers = [2**exponent for exponent in range(13) if round(exact_gbs / 2**exponent)]
    for power in reversed(powers):
        gbs = round(exact_gbs / power) * power
        if abs(gbs / exact_gbs - 1) <= PLANNED_BATCH_TOLERANCE:
            return gbs
    return max(1, round(exact_gbs))


# -- notes for the user ----------------------------------------------------------------------------------------------


def _describe_planned_layout(recipe: Recipe, result: SizedRecipe) -> list[str]:
    """Return a note that the layout was planned now and is not proven; [] for other layouts."""
    (nodes,) = result.nodes
    if not result.planned:
        return []
    if result.gpus_per_node < recipe.gpus_per_node:
        used_gpus = f"{result.gpus_per_node} of the {recipe.gpus_per_node} GPUs of a node"
        return [f"{used_gpus}: planned now, {explain.title(result.layout())}; not proven"]
    if nodes in recipe.layouts:
        return [f"planned now, {explain.title(result.layout())}; not proven in this layout"]
    sizes = ", ".join(map(str, recipe.nodes))
    return [
        f"{counted(nodes, 'node')} is not a declared size of {recipe.name} ({sizes}): planned now, "
        f"{explain.title(result.layout())}; not proven; to build it: `recipes prove {recipe.name} --nodes {nodes}`; "
        "to train a smaller model in this layout: `recipes rehearse`"
    ]


def _suggest_batch_size(recipe: Recipe, nodes: int, job: PlannedJob) -> list[str]:
    """Return a note that suggests a similar batch size with a much higher throughput; [] if there is none.

    For example, 512 samples on 33 nodes allow only pipelines with 33 stages.
    """
    world, layout = job.gpus, job.layout
    units = [unit for unit in (world, world // 2, world // 4, world // 8) if unit]
    candidates = [round(layout.gbs / unit) * unit for unit in units]
    gbs = next((gbs for gbs in candidates if gbs and abs(gbs / layout.gbs - 1) <= BATCH_TOLERANCE), layout.gbs)
    better_job = tune.best_job(recipe, nodes, gbs) if gbs != layout.gbs else None
    if better_job is None:
        return []
    gain = (plans.seconds(job) / job.tokens) / (plans.seconds(better_job) / better_job.tokens) - 1
    if gain < MIN_BATCH_GAIN:
        return []
    return [
        f"a global batch of {layout.gbs:,} allows few layouts on {world:,} GPUs: --gbs {gbs} increases throughput by "
        f"{gain:.0%}, with {explain.title(better_job.layout)}"
    ]


def _describe_tokens_per_step(recipe: Recipe, result: SizedRecipe, size: Size) -> list[str]:
    """Return a note on the tokens per step if they were requested or have changed, else []."""
    gbs, declared = result.layout().gbs, recipe.layout().gbs
    before, now = declared * recipe.seq, gbs * result.seq
    batch = f"gbs {gbs:,} x seq {result.seq:,}"
    if size.gbs is None and size.batch_tokens is None:
        if now == before:
            return []
        note = f"{TOKENS_PER_STEP}: {before:,} before, {now:,} now ({batch})"
        if size.layout is None or size.layout.gbs == declared:
            note += f"; --batch-tokens {before} keeps them"
        return [note]
    note = f"{TOKENS_PER_STEP}: {now:,} ({batch})"
    requested_tokens = size.batch_tokens or now
    if requested_tokens != now:
        note += f", the legal number nearest to {requested_tokens:,} ({now / requested_tokens - 1:+.1%})"
    if now != before:
        note += f"; the recipe's learning rate and steps were chosen for {before:,}"
    return [note]


def find_sized(name: str, size: Size) -> Recipe:
    """Return the recipe with a name, adapted to `size`. Raises UserError like `find` and `adapt`."""
    return adapt(find(name), size)
