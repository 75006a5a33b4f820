"""A recipe at the size, sequence, batch and layout that somebody asks for, whether it declares them or not.

The result is a recipe again, laid out for that one size: whatever is made of a recipe is made of it in the same way.
Needs no NeMo.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from superpod.collection.registry import Recipe, find
from superpod.collection.sizes import tune
from superpod.errors import UserError
from superpod.planner import explain, plans
from superpod.planner.layout import Layout
from superpod.planner.models import ModelShape
from superpod.planner.planned_job import PlannedJob
from superpod.planner.rules import rules

MOST = 2**24
"""Tokens of a sample, and samples of a batch; more is a typing mistake."""
NEAR = 0.05
"""Share by which a batch may miss the tokens that were asked for: what a legal batch nearest to them is off."""
ROUND = 0.02
"""The same where the layout is not chosen yet: so round numbers divide by most degrees of data parallelism."""
ROUNDER = 0.1
"""Gain in tokens a second from which a batch that divides better is worth a line."""
OF_BATCH = ("gbs", "micro_batches")
"""Rules of `planner/rules/rules.py` that another batch mends."""

COMMAND_LINE, PLANNED = "command line", "planned now"
"""What has set a value that no layout file declares."""


@dataclass(frozen=True)
class Size:
    """What is asked of a recipe; None = what it declares, and of the size in nodes the smallest."""

    num_nodes: int | None = None
    seq: int | None = None
    """Tokens of a sample."""
    gbs: int | None = None
    """Samples of a global batch."""
    batch_tokens: int | None = None
    """Tokens of a global batch, in place of `gbs`: the nearest legal batch is taken."""
    layout: Layout | None = None
    """A whole layout. Its global batch counts where neither `gbs` nor `batch_tokens` is given."""
    best: bool = False
    """Take the planner's fastest layout, also at a size that is declared."""
    gpus_per_node: int | None = None
    """Of one node, where fewer of its GPUs are used than it has."""


@dataclass(frozen=True)
class SizedRecipe(Recipe):
    """A recipe laid out for one size, as it was asked for."""

    set_by: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)
    """Field of `Layout`, or `seq` -> what has set it, where that is not its layout file."""
    planned: bool = False
    """The planner has chosen its layout: nothing was built or rehearsed with it."""
    notes: tuple[str, ...] = ()
    """What to know of it, a line each."""

    @property
    def shape(self) -> ModelShape:
        """Its model. A learned table of positions has a row for every token of a sample."""
        shape = super().shape
        return shape.replace(positions=self.seq) if shape.positions else shape


def sized(recipe: Recipe, size: Size) -> Recipe:
    """The recipe as `size` asks for it; itself where nothing but a declared size is.

    A size that is not declared is planned on the spot. A layout that is given or declared is taken as it is, legal and
    fitting or not; only its batch must be one that it can have.

    Raises:
        UserError: a number out of range, two that contradict each other, a batch that the layout cannot have, a
            sequence that the weights do not have, or a size at which no layout fits.
    """
    if size.gpus_per_node == recipe.gpus_per_node:
        size = replace(size, gpus_per_node=None)
    check(recipe, size)
    nodes = recipe.nodes[0] if size.num_nodes is None else size.num_nodes
    if size == Size(size.num_nodes) and nodes in recipe.layouts:
        return recipe
    return _sized(recipe.name, recipe, replace(size, num_nodes=nodes))


@lru_cache(maxsize=256)
def _sized(name: str, recipe: Recipe, size: Size) -> SizedRecipe:
    """As `sized`. A verb asks several times, and a search takes a second."""
    per_node = size.gpus_per_node or recipe.gpus_per_node
    nodes, world = size.num_nodes or 0, (size.num_nodes or 0) * per_node
    longer = replace(recipe, seq=size.seq or recipe.seq, gpus_per_node=per_node)
    own = size.layout or (None if size.gpus_per_node else recipe.layouts.get(nodes))
    set_by = {"seq": COMMAND_LINE} if longer.seq != recipe.seq else {}
    job = None
    if own is None or size.best:
        gbs = wanted_batch(recipe, size)
        job = _planned(longer, nodes, gbs)
        layout = job.layout
        set_by |= dict.fromkeys((f.name for f in fields(layout)), PLANNED)
    else:
        gbs = _batch(longer, size, own, world)
        layout = own.replace(gbs=gbs)
        if size.layout:
            set_by |= dict.fromkeys((f.name for f in fields(layout)), COMMAND_LINE)
    if gbs != recipe.layout().gbs:
        set_by["gbs"] = COMMAND_LINE
    values: dict[str, Any] = {f.name: getattr(longer, f.name) for f in fields(Recipe)}
    values["layouts"] = {nodes: layout}
    as_declared = layout == recipe.layouts.get(nodes) and longer.seq == recipe.seq
    as_declared = as_declared and not size.gpus_per_node
    values["saves"] = {nodes: recipe.saves[nodes]} if as_declared and nodes in recipe.saves else {}
    result = SizedRecipe(**values, set_by=set_by, planned=job is not None)
    rounder = _of_rounder(longer, nodes, job) if job else []
    notes = (*_of_size(recipe, result), *rounder, *_of_batch(recipe, result, size))
    return replace(result, notes=notes)


def nodes_of(recipe: Recipe, gpus: int, nodes: int | None) -> tuple[int, int | None]:
    """The nodes of so many GPUs, and the GPUs of one node where they do not fill it.

    Raises:
        UserError: no positive number, more than a node's GPUs that fill none, or another number than `nodes` have.
    """
    node = recipe.gpus_per_node
    if gpus < 1:
        raise UserError(f"--gpus is {gpus}; it is 1 or more", f"a node of {recipe.name} has {node}")
    if gpus < node and nodes in (None, 1):
        return 1, gpus
    if nodes is not None and gpus != nodes * node:
        raise UserError(
            f"--gpus {gpus} and --nodes {nodes} of {node} GPUs contradict each other", f"--nodes {nodes} alone"
        )
    if gpus % node:
        near = " or ".join(f"--nodes {n}" for n in (gpus // node, gpus // node + 1) if n)
        raise UserError(f"{gpus} GPUs do not fill whole nodes: {recipe.name} has {node} GPUs a node", near)
    return gpus // node, None


def best(recipe: Recipe, nodes: int) -> Layout | None:
    """The planner's fastest layout for a recipe at a size and the sequence and batch it has there; None = none fits."""
    job = tune.best(recipe, nodes, recipe.layout(nodes).gbs)
    return job.layout if job else None


def _planned(recipe: Recipe, nodes: int, gbs: int) -> PlannedJob:
    job = tune.best(recipe, nodes, gbs)
    if job is None:
        raise UserError(*tune.refusal(recipe, nodes, gbs))
    return job


# -- what was asked for ----------------------------------------------------------------------------------------------


def check(recipe: Recipe, size: Size) -> None:
    """Refuse numbers out of range, and those that contradict each other or the weights. Raises UserError."""
    limits = {"--nodes": (size.num_nodes, tune.MOST_NODES), "--seq": (size.seq, MOST), "--gbs": (size.gbs, MOST)}
    for option, (value, most) in limits.items():
        if value is not None and not 1 <= value <= most:
            raise UserError(f"{option} is {value:,}; it is 1 to {most:,}", "leave it out for the recipe's own")
    if size.gpus_per_node is not None:
        most = recipe.gpus_per_node
        if not 1 <= size.gpus_per_node < most or (size.num_nodes or 1) > 1:
            raise UserError(
                f"{size.gpus_per_node} GPUs do not fill whole nodes: {recipe.name} has {most} GPUs a node",
                f"1 to {most - 1} GPUs of one node, or --nodes N",
            )
    seq = size.seq or recipe.seq
    if size.batch_tokens is not None and not seq <= size.batch_tokens <= MOST * seq:
        raise UserError(
            f"--batch-tokens is {size.batch_tokens:,}, and one sample has {seq:,} tokens",
            f"give a whole batch: --batch-tokens {recipe.layout().gbs * seq}",
        )
    if size.gbs is not None and size.batch_tokens not in (None, size.gbs * seq):
        raise UserError(
            f"--gbs {size.gbs:,} of {seq:,} tokens is {size.gbs * seq:,} tokens, and --batch-tokens is "
            f"{size.batch_tokens:,}",
            "give one of the two",
        )
    rows = recipe.model.shape.positions
    if recipe.task != "pretrain" and rows and seq != rows:
        raise UserError(
            f"--seq {seq}: the weights that {recipe.name} starts from have {rows} learned positions",
            f"leave it at {rows}, or pretrain: a new table has a row for every token",
        )


def _batch(recipe: Recipe, size: Size, layout: Layout, world: int) -> int:
    """The samples of a batch that a layout can have: those asked for, or its own.

    Raises:
        UserError: with the legal numbers on both sides.
    """
    if size.gbs is None and size.batch_tokens is None:
        return layout.gbs
    wanted = float(size.gbs) if size.gbs is not None else (size.batch_tokens or 0) / recipe.seq
    if world % layout.model_parallel:
        return max(1, round(wanted))  # another rule refuses it
    below, above = _legal(layout, world, wanted)
    if below == wanted:
        return below
    near = [gbs for gbs in (below, above) if gbs]
    nearest = min(near, key=lambda gbs: abs(gbs - wanted))
    if size.gbs is None and abs(nearest / wanted - 1) <= NEAR:
        return nearest
    unit = f"mbs {layout.mbs} x dp {layout.dp(world)}"
    given = f"--gbs {size.gbs:,}" if size.gbs is not None else f"--batch-tokens {size.batch_tokens:,} is {wanted:,.1f}"
    rule = f"{unit} x pp {layout.pp}, which its interleaved pipeline fills" if layout.vp else unit
    raise UserError(
        f"{given}: on {world} GPUs in {explain.title(layout)} the global batch is a multiple of {rule}",
        " or ".join(f"--gbs {gbs} ({gbs * recipe.seq:,} tokens)" for gbs in near) + "; or --layout auto",
    )


def _legal(layout: Layout, world: int, wanted: float) -> tuple[int, int]:
    """The legal batches on both sides of one; the lower is 0 where none is below."""
    exact = int(wanted)
    if exact == wanted:
        broken = rules.layout(layout.replace(gbs=exact).rule_inputs(world))
        if not any(rule.rule in OF_BATCH for rule in broken):
            return exact, exact
    step = layout.mbs * layout.dp(world) * (layout.pp if layout.vp else 1)
    below = int(wanted // step) * step
    return below, below + step


def wanted_batch(recipe: Recipe, size: Size) -> int:
    """The samples of a batch whose layout is still to be planned: of tokens, a number that much divides."""
    if size.gbs is not None:
        return size.gbs
    if size.batch_tokens is None:
        return size.layout.gbs if size.layout else recipe.layout().gbs
    exact = size.batch_tokens / (size.seq or recipe.seq)
    units = [2**power for power in range(13) if round(exact / 2**power)]
    near = [round(exact / unit) * unit for unit in units]
    return next((gbs for gbs in reversed(near) if abs(gbs / exact - 1) <= ROUND), max(1, round(exact)))


# -- what to know of it ----------------------------------------------------------------------------------------------


def _of_size(recipe: Recipe, result: SizedRecipe) -> list[str]:
    (nodes,) = result.nodes
    if not result.planned:
        return []
    if result.gpus_per_node < recipe.gpus_per_node:
        used = f"{result.gpus_per_node} of a node's {recipe.gpus_per_node} GPUs"
        return [f"{used}: planned now, {explain.title(result.layout())}; not proven"]
    if nodes in recipe.layouts:
        return [f"planned now, {explain.title(result.layout())}; not proven in this layout"]
    sizes, count = ", ".join(map(str, recipe.nodes)), f"{nodes:,} node{'s' * (nodes != 1)}"
    return [
        f"{count} is not a declared size of {recipe.name} ({sizes}): planned now, {explain.title(result.layout())}; "
        f"not proven: `recipes prove {recipe.name} --nodes {nodes}` builds it, and `recipes rehearse` trains it, shrunk"
    ]


def _of_rounder(recipe: Recipe, nodes: int, own: PlannedJob) -> list[str]:
    """That a batch near that of the planned job divides much better: 512 samples on 33 nodes leave only pipelines of
    33 stages.
    """
    world, layout = own.gpus, own.layout
    near = (round(layout.gbs / unit) * unit for unit in (world, world // 2, world // 4, world // 8) if unit)
    gbs = next((gbs for gbs in near if gbs and abs(gbs / layout.gbs - 1) <= NEAR), layout.gbs)
    other = tune.best(recipe, nodes, gbs) if gbs != layout.gbs else None
    if other is None:
        return []
    gain = (plans.seconds(own) / own.tokens) / (plans.seconds(other) / other.tokens) - 1
    if gain < ROUNDER:
        return []
    return [
        f"a global batch of {layout.gbs:,} divides badly over {world:,} GPUs: --gbs {gbs} trains {gain:.0%} more "
        f"tokens a second, in {explain.title(other.layout)}"
    ]


def _of_batch(recipe: Recipe, result: SizedRecipe, size: Size) -> list[str]:
    """The tokens of a step before and after, where they are asked for or change by themselves."""
    gbs, own = result.layout().gbs, recipe.layout().gbs
    before, now = own * recipe.seq, gbs * result.seq
    batch = f"gbs {gbs:,} x seq {result.seq:,}"
    if size.gbs is None and size.batch_tokens is None:
        if now == before:
            return []
        keep = f"--batch-tokens {before} keeps them" if size.layout is None or size.layout.gbs == own else ""
        return [f"tokens a step: {before:,} before, {now:,} now ({batch})" + f"; {keep}" * bool(keep)]
    goal = size.batch_tokens or now
    missed = f", the nearest legal to {goal:,} ({now / goal - 1:+.1%})" if goal != now else ""
    pace = f"; the recipe's learning rate and steps are made for {before:,}" if now != before else ""
    return [f"tokens a step: {now:,} ({batch}){missed}{pace}"]


def of_name(name: str, size: Size) -> Recipe:
    """`sized` of the recipe of that name. Raises UserError as `find` and `sized`."""
    return sized(find(name), size)
