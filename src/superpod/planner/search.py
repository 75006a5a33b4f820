"""Search all legal layouts of a run: predict their memory and step time, and rank them.

A search combines the lists of values in `Space`, removes the layouts that violate a rule of `legality.py`, and predicts
the others with `memory/` and `steptime.py` as columns, without a loop over layouts. The result includes layouts that do
not fit, so that `explain.py` can list those that would be faster.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from superpod.errors import UserError, did_you_mean
from superpod.planner import legality, memory
from superpod.planner.arrays import Array, Column, Flags
from superpod.planner.calibration import calibration
from superpod.planner.columns import Stages
from superpod.planner.layout import MEGATRON_FSDP, RECOMPUTES, SHARDINGS, Layout, Recompute, RecomputeMethod, Sharding
from superpod.planner.models import Split
from superpod.planner.models.stages import ENDS, chunks_before_head, divides_with_ends, near_even_chunks
from superpod.planner.planned_job import PlannedJob
from superpod.planner.rules import rules
from superpod.planner.timing import step_cost, steptime


class RecomputeOption(NamedTuple):
    """The four fields of `Layout` that specify recomputation."""

    granularity: Recompute
    method: RecomputeMethod = "uniform"
    layers: int = 1
    modules: tuple[str, ...] = ("core_attn",)


NOT_SEARCHED = ("gbs", "chunks", "first_layers", "last_layers")
"""Fields of `Layout` that the run determines, or that follow from others."""
FIELDS = ("tp", "pp", "vp", "cp", "ep", "etp", "sp", "mbs", "sharding", "split", "recompute_option")
"""What distinguishes the layouts of a search."""
DEGREES = ("tp", "pp", "cp", "ep")
"""The main parallel degrees; layouts are grouped by them."""
BLOCK = 32_768
"""Number of layouts that are computed at once, so that intermediate arrays stay in the CPU caches."""


@dataclass(frozen=True)
class Space:
    """The values that a search tries. Degrees that do not divide the number of GPUs are skipped."""

    tp: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    cp: tuple[int, ...] = tuple(2**i for i in range(9))
    sp: tuple[bool, ...] = (False, True)
    mbs: tuple[int, ...] = (1, 2, 3, 4, 6, 8)
    sharding: tuple[Sharding, ...] = tuple(name for name in SHARDINGS if name not in MEGATRON_FSDP)
    """Without Megatron-FSDP, whose predictions are not validated by measured runs; `fixed` can select it."""
    max_vp: int = 16
    """Maximum number of model chunks per pipeline rank; each costs kernel launches and messages."""
    fixed: dict[str, Any] = field(default_factory=dict)
    """Field of `Layout` -> the only value that the search tries."""

    def __post_init__(self) -> None:
        field_names = [name for name in Layout.__dataclass_fields__ if name not in NOT_SEARCHED]
        for key in self.fixed:
            if key not in field_names:
                hint = did_you_mean(key, field_names) or f"keys: {', '.join(field_names)}"
                raise UserError(f"the search cannot fix the layout key {key!r}", hint)
        if wrong := Layout.from_mapping(self.fixed, "the fixed layout").below_one():
            raise UserError(wrong[0].message)


@dataclass(frozen=True)
class SearchResult:
    """All legal layouts of a run with their predictions, as arrays of shape [layouts]."""

    job: PlannedJob
    """The run; only gbs of its layout is used."""
    fields: dict[str, Column]
    """`FIELDS` of each layout; `split` and `recompute_option` are indices, `etp` and `vp` are at least 1."""
    splits: tuple[Split, ...]
    """The splits to which `fields["split"]` refers."""
    recompute_options: tuple[RecomputeOption, ...]
    """The options to which `fields["recompute_option"]` refers."""
    seconds: Array
    """Step time."""
    bubble: Array
    """Seconds of the step time in the pipeline bubble."""
    reserved: Array
    """Reserved bytes on the pipeline rank with the highest peak."""
    allocated: Array
    """Allocated bytes on the pipeline rank with the highest peak."""
    fit: Column
    """FITS, TIGHT or TOO_LARGE, from `memory.classify`."""
    cap: float
    """Bytes that a rank may reserve."""

    def __len__(self) -> int:
        return len(self.seconds)

    @cached_property
    def fits(self) -> Flags:
        """Mask of the layouts that fit; tight layouts do not."""
        return self.fit == memory.FITS

    @cached_property
    def ranked(self) -> Column:
        """Indices of the layouts that fit or are tight, sorted by step time (rounded to 0.1 %), complexity and memory.

        Tight layouts follow the others; the last are those whose reserved bytes exceed the cap.
        """
        usable = np.flatnonzero(self.fit != memory.TOO_LARGE)
        # Equal within 0.1 %: the model is not more accurate.
        rounded_time = np.round(np.log(self.seconds[usable]) * 1000)
        tight, reserved = self.tight[usable], self.reserved[usable]
        over = tight & (reserved > self.cap)
        return usable[np.lexsort((reserved, self._complexity(usable), rounded_time, over, tight))]

    @property
    def tight(self) -> Flags:
        """Mask of the tight layouts: with almost no free memory, or only without fragmentation."""
        return self.fit == memory.TIGHT

    def _complexity(self, layouts: Column) -> Column:
        """Complexity of some layouts: parallel degrees, virtual and uneven stages, sharding, recomputation."""
        degrees = np.sum([self.fields[key][layouts] for key in ("tp", "pp", "vp", "cp", "ep", "sharding")], axis=0)
        uneven = np.array([split.chunks is not None for split in self.splits])[self.fields["split"][layouts]]
        return degrees + 4 * uneven + 2 * (self.fields["recompute_option"][layouts] > 0)

    @cached_property
    def best_per_degrees(self) -> Column:
        """Indices of the first layout in `ranked` for each combination of TP, PP, CP and EP."""
        code = np.zeros(len(self.ranked), dtype=np.int64)
        for key in DEGREES:
            code = code * (self.fields[key].max() + 1) + self.fields[key][self.ranked]
        return self.ranked[np.sort(np.unique(code, return_index=True)[1])]

    def layout(self, i: int) -> Layout:
        """Return the i-th layout."""
        values = {key: int(column[i]) for key, column in self.fields.items()}
        split = self.splits[values["split"]]
        recompute = self.recompute_options[values["recompute_option"]]
        return Layout(
            **{key: values[key] for key in ("tp", "pp", "cp", "ep", "mbs")},
            gbs=self.job.layout.gbs,
            sp=bool(values["sp"]),
            embedding_as_layer=split.embedding_as_layer,
            loss_as_layer=split.loss_as_layer,
            vp=values["vp"] if values["vp"] > 1 else None,
            etp=values["etp"] if values["etp"] != values["tp"] else None,
            chunks=split.chunks,
            recompute=recompute.granularity,
            recompute_method=recompute.method,
            recompute_layers=recompute.layers,
            recompute_modules=recompute.modules,
            sharding=SHARDINGS[values["sharding"]],
        )

    def job_at(self, i: int) -> PlannedJob:
        """Return the run with the i-th layout."""
        return self.job.replace(layout=self.layout(i))


def search(job: PlannedJob, space: Space | None = None, *, memory_cap_gib: float | None = None) -> SearchResult:
    """Predict memory and step time of all legal layouts of a run; only gbs of `job.layout` is used.

    Raises:
        UserError: no layout is legal.
    """
    space = space or Space()
    if memory_cap_gib is not None:
        job = job.replace(options=replace(job.options, memory_cap=memory_cap_gib))
    splits = (*_splits(job, space), *_uneven_splits(job, space))
    splits = (*splits, *_splits_before_head(job, space, splits))
    recompute_options = _recompute_options(job, space)
    grid, legal = _legal_grid(job, splits, _grid(job, space, splits, recompute_options))
    if not legal.any():
        raise _no_legal_layout_error(job, space)
    figures = {key: _at(part, legal) for key, part in _costs(job, Stages(job.model, splits), grid).items()}
    fields = {key: _at(np.broadcast_to(grid[key], legal.T.shape).T, legal) for key in FIELDS}
    fit = memory.classify(job, figures.pop("needed"), figures["reserved"])
    return SearchResult(job, fields, splits, recompute_options, **figures, fit=fit, cap=memory.limit(job))


def _no_legal_layout_error(job: PlannedJob, space: Space) -> UserError:
    """Return the error for a search without legal layouts: a rule that all layouts violate, or the batch size."""
    message = f"no layout of {job.model.name} on {job.gpus} GPUs is legal"
    if forbidden := legality.layout_independent_violation(job):
        return UserError(f"{message}: {forbidden.message}", forbidden.fix)
    message = f"{message} at gbs {job.layout.gbs} and seq {job.seq}"
    if not space.fixed:
        return UserError(message, CHANGE_GBS)
    message += f" with {', '.join(f'{key}={value}' for key, value in space.fixed.items())}"
    violations = legality.violations(job.replace(layout=replace(job.layout, **space.fixed)))
    if violations:
        return UserError(f"{message}: {violations[0].message}", violations[0].fix)
    return UserError(message, CHANGE_GBS)


CHANGE_GBS = "gbs must be a multiple of the data-parallel size: change the number of GPUs or gbs"


def _costs(job: PlannedJob, stages: Stages, grid: dict[str, Column]) -> dict[str, Array]:
    """Return step time, bubble, and the bytes on the rank with the highest peak: [rows, recompute options, shardings].

    Rows with the same number of distinct ranks are computed together, so that few ranks only pad a block.
    """
    from concurrent.futures import ThreadPoolExecutor

    shape = np.broadcast_shapes(*(column.shape for column in grid.values()))
    costs = {key: np.empty(shape[::-1]) for key in ("seconds", "bubble", "allocated", "needed", "reserved")}
    units = step_cost.unit_costs(job, grid)
    seconds = steptime.unit_seconds(units, calibration.constants(job))

    def cost(at: Column) -> None:
        columns = stages.columns(grid["split"][at], _rows(grid, at))
        step = steptime.step(job, columns, units.rows(at), seconds)
        highest = memory.peak(job, columns).highest(columns.weight > 0)
        parts = {"seconds": step.seconds, "bubble": step.terms["pp_bubble"], **highest._asdict()}
        for key, part in parts.items():
            costs[key].T[..., at] = part

    order = np.argsort(stages.ranks[grid["split"]], kind="stable")
    count = max(1, BLOCK // math.prod(shape[:-1]))
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # numpy releases the GIL
        list(pool.map(cost, (order[start : start + count] for start in range(0, len(order), count))))
    return costs


def _splits(job: PlannedJob, space: Space) -> Iterator[Split]:
    """Yield the even splits, in which the embedding and the loss may count as layers."""
    fixed = space.fixed
    for embedding, loss in ENDS:
        if fixed.get("embedding_as_layer", embedding) != embedding or fixed.get("loss_as_layer", loss) != loss:
            continue
        total = job.model.layers + embedding + loss
        for pp in (p for p in range(1, total + 1) if total % p == 0 and job.gpus % p == 0):
            # On one rank, it makes no difference whether the embedding and the loss count as layers.
            if fixed.get("pp", pp) != pp or (pp == 1 and (embedding or loss)):
                continue
            for vp in (v for v in range(1, total // pp + 1) if total // pp % v == 0):
                if (fixed.get("vp", vp) or 1) != vp or (vp > 1 and (pp == 1 or vp > space.max_vp)):
                    continue
                yield Split(pp=pp, vp=vp, embedding_as_layer=embedding, loss_as_layer=loss)


def _uneven_splits(job: PlannedJob, space: Space) -> Iterator[Split]:
    """Yield splits for layers that pp does not divide, such as 61 layers on 4 stages: chunks differ by one layer."""
    layers, fixed = job.model.layers, space.fixed
    # Megatron supports no uneven stages for hybrid models (rules.py).
    if job.model.pattern or fixed.get("embedding_as_layer") or fixed.get("loss_as_layer"):
        return
    for pp in (
        p for p in range(2, min(layers, job.gpus) + 1) if job.gpus % p == 0 and not divides_with_ends(layers, p)
    ):
        depths = (fixed["vp"] or 1,) if "vp" in fixed else (1, 2, 3, 4, 8, 16)
        for vp in (v for v in depths if pp * v <= layers and v <= space.max_vp):
            if fixed.get("pp", pp) == pp:
                yield Split(pp=pp, vp=vp, chunks=near_even_chunks(layers, pp * vp))


HEAD_FACTORS = (1.0, 1.25)
"""Factors on the output layer's FLOPs that are tried: the loss is memory-bound and takes longer than its FLOPs."""
MAX_RELATIVE_LOAD = 0.99
"""An uneven partition is tried only if it reduces the load of the largest stage to this fraction or less."""


def _splits_before_head(job: PlannedJob, space: Space, splits: tuple[Split, ...]) -> Iterator[Split]:
    """Yield splits whose last stage has fewer layers, for models whose output layer takes as long as several layers.

    Examples are a vocabulary of 256,000 with a small hidden size, and multi-token prediction.
    """
    model = job.model
    if model.pattern or model.runs or {"embedding_as_layer", "loss_as_layer"} & set(space.fixed):
        return
    head, lightest = _head_in_layers(job), dict[tuple[int, int], float]()
    for split in splits:
        load = _max_rank_layers([len(chunk) for chunk in split.chunk_layers(model.layers)], split.pp, head)
        lightest[split.pp, split.vp] = min(load, lightest.get((split.pp, split.vp), load))
    for (pp, vp), load in lightest.items():
        if pp == 1 or pp * vp > model.layers:
            continue
        for chunks in dict.fromkeys(chunks_before_head(model.layers, pp, vp, head * share) for share in HEAD_FACTORS):
            # Megatron builds multi-token prediction from the last layer of the last chunk; without it, the last
            # chunk may have no layers.
            filled_chunks = chunks if model.mtp_layers else chunks[:-1]
            if chunks and 0 not in filled_chunks and _max_rank_layers(chunks, pp, head) < MAX_RELATIVE_LOAD * load:
                yield Split(pp=pp, vp=vp, chunks=chunks)


def _head_in_layers(job: PlannedJob) -> float:
    """Return the FLOPs of the output layer and multi-token prediction, divided by those of an average layer."""
    model = job.model
    head = 6.0 * model.vocab * model.hidden * (1 + model.mtp_layers)
    layer = (model.flops_per_token(job.seq, causal=True) - head) / (model.layers + model.mtp_layers)
    return model.mtp_layers + head / layer


def _max_rank_layers(chunks: Sequence[int], pp: int, head: float) -> float:
    """Return the layers of the pipeline rank with the highest load; the output layer counts as `head` layers."""
    ranks = [sum(chunks[rank::pp]) for rank in range(pp)]
    return max(*ranks[:-1], ranks[-1] + head) if pp > 1 else ranks[0] + head


def _recompute_options(job: PlannedJob, space: Space) -> tuple[RecomputeOption, ...]:
    """Return the recompute options to try for a model, no recomputation first."""
    m = job.model
    modules: list[tuple[str, ...]] = [("core_attn",), ("layernorm",), ("mlp",), ("layernorm", "mlp")]
    if not any(job.has_separate_norm(kind) for kind in m.kinds):  # no norm is a separate module
        modules = [mods for mods in modules if "layernorm" not in mods]
    if m.kv_lora:
        modules += [("mla_up_proj",), ("mla_up_proj", "mlp")]
    if m.is_moe:
        modules = [mods for mods in modules if "mlp" not in mods]
        modules += [("moe_act",), ("layernorm", "moe_act"), ("moe",)]
    options = [RecomputeOption("none")]
    options += [RecomputeOption("selective", modules=mods) for mods in modules]
    options += [RecomputeOption("full")]
    # Models with experts have many more layouts, so fewer options are tried.
    several = (1, 2, 4) if m.is_moe else (1, 2, 3, 4, 6, 8, 12, 16)
    options += [RecomputeOption("full", "block", n) for n in several if n < m.layers]
    fixed = space.fixed
    names = ("recompute", "recompute_method", "recompute_layers", "recompute_modules")
    fits = tuple(r for r in options if all(fixed.get(k, v) == v for k, v in zip(names, r, strict=True)))
    fixed_layout = Layout.from_mapping({k: v for k, v in fixed.items() if k in names}, "the fixed layout")
    given_option = RecomputeOption(
        fixed_layout.recompute,
        fixed_layout.recompute_method,
        fixed_layout.recompute_layers,
        fixed_layout.recompute_modules,
    )
    return fits or (given_option,)


def _grid(
    job: PlannedJob, space: Space, splits: tuple[Split, ...], recompute_options: tuple[RecomputeOption, ...]
) -> dict[str, Column]:
    """Return the fields of all layouts that divide the GPUs and the batch: [shardings, recompute options, rows]."""
    # First the degrees that divide the number of GPUs and the batch, so that the product below stays small.
    degrees = _product({}, {"split": np.arange(len(splits)), "tp": _list(space, "tp"), "cp": _list(space, "cp")})
    for key in ("pp", "vp", "embedding_as_layer", "loss_as_layer"):
        degrees[key] = np.array([int(getattr(split, key)) for split in splits])[degrees["split"]]
    unit = degrees["tp"] * degrees["pp"] * degrees["cp"]
    degrees["dp"] = np.maximum(1, job.gpus // unit)
    degrees["gbs"] = np.full_like(unit, job.layout.gbs)
    degrees = _where(degrees, (job.gpus % unit == 0) & (job.layout.gbs % degrees["dp"] == 0))
    if job.model.is_moe:
        ep = _list(space, "ep") if "ep" in space.fixed else _divisors(job.model.experts)
        etp = [space.fixed["etp"]] if "etp" in space.fixed else [1, 0]  # 0 = same as tp
        degrees = _product(degrees, {"ep": ep, "etp": np.array(etp)})
        # With tp 1, "same as tp" would repeat etp 1.
        degrees = _where(degrees, (degrees["etp"] > 0) | (degrees["tp"] > 1))
        degrees["etp"] = np.where(degrees["etp"] > 0, degrees["etp"], degrees["tp"])
        degrees = _where(degrees, job.gpus // degrees["pp"] % (degrees["ep"] * degrees["etp"]) == 0)
    else:
        ones = np.ones_like(degrees["tp"])
        degrees |= {"ep": ones * space.fixed.get("ep", 1), "etp": ones * space.fixed.get("etp", degrees["tp"])}
    rows = _product(degrees, {"sp": _list(space, "sp"), "mbs": _list(space, "mbs")})
    rows = _where(rows, rows["gbs"] % (rows["mbs"] * rows["dp"]) == 0)
    sharding = np.array([SHARDINGS.index(name) for name in _names(space, "sharding")])
    if job.model.is_moe and len(sharding) > 1:  # unsharded states are never better, and MoE has many layouts
        sharding = sharding[sharding > 0]
    rows["micro_batches"] = rows["gbs"] // (rows["mbs"] * rows["dp"])
    options = {
        "recompute_option": range(len(recompute_options)),
        "recompute": [RECOMPUTES.index(r.granularity) for r in recompute_options],
        "recompute_block": [int(r.method == "block") for r in recompute_options],
        "recompute_layers": [r.layers for r in recompute_options],
        "modules": [rules.bits(r.modules) if r.granularity == "selective" else 0 for r in recompute_options],
    }
    return (
        rows
        | {key: np.array(values)[:, None] for key, values in options.items()}
        | {"sharding": sharding[:, None, None]}
    )


def _legal_grid(job: PlannedJob, splits: tuple[Split, ...], grid: dict[str, Column]) -> tuple[dict[str, Column], Flags]:
    """Return the rows of a grid with legal layouts, and which are legal: [rows, recompute options, shardings]."""
    given_chunks = np.array([split.chunks is not None for split in splits], dtype=bool)[grid["split"]]
    legal = legality.legal_mask(job, {key: grid[key] for key in legality.FIELDS if key in grid}, given_chunks)
    legal = legal & ((grid["sharding"] < 2) | (grid["pp"] == 1))  # recipes of Megatron-FSDP have no pipeline
    rows = np.flatnonzero(legal.any(axis=(0, 1)))
    return _rows(grid, rows), legal.T[rows]


def _names(space: Space, key: str) -> tuple[Any, ...]:
    """Return the values of a field to try: the fixed one, else those of the space."""
    return (space.fixed[key],) if key in space.fixed else getattr(space, key)


def _list(space: Space, key: str) -> Column:
    return np.array([int(value) for value in _names(space, key)], dtype=np.int64)


def _divisors(n: int) -> Column:
    return np.array([d for d in range(1, n + 1) if n % d == 0], dtype=np.int64)


def _product(rows: dict[str, Column], lists: dict[str, Column]) -> dict[str, Column]:
    """Return the Cartesian product of the rows of a table with lists of values, as a table."""
    axes = [np.arange(len(next(iter(rows.values()))) if rows else 1), *lists.values()]
    grid = [axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")]
    return {key: c[grid[0]] for key, c in rows.items()} | dict(zip(lists, grid[1:], strict=True))


def _rows(grid: dict[str, Column], rows: Column) -> dict[str, Column]:
    """Return some rows of a grid."""
    return {key: column[rows] if column.ndim == 1 else column for key, column in grid.items()}


def _at(part: Any, legal: Flags) -> Any:
    """Return the entries of the legal layouts; if all are legal, without a copy."""
    return part.reshape(-1) if legal.all() else part[legal]


def _where(columns: dict[str, Column], mask: Flags) -> dict[str, Column]:
    return _rows(columns, np.flatnonzero(mask))
