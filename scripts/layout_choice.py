"""The layouts of a group of recipes: searched, and as few different ones as leave each within 3 % of its fastest."""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

from layout_cases import SEARCHED_PRECISIONS, Case, searched, sized_as
from superpod.errors import UserError
from superpod.planner import memory, models, predict
from superpod.planner.layout import Layout
from superpod.planner.search import Space, search

AS_FAST = 1.03
"""Layouts within so much of the fastest are as good: less than the planner errs (docs/planner.md)."""
HEADROOM = 0.95
"""Of what a rank may take, the most that a recipe does: for unlike experts, longer lists of buckets, a newer NCCL."""
MOST_STAGES = 32
"""Pipelines deeper than that are planned well and run badly: every stage waits for the slowest."""
MOST_GPUS = 2048
SIMPLEST = 12
"""Layouts of each search that may be chosen from."""
ACCURACY = Path(__file__).resolve().parent.parent / "docs" / "planner.md"

Known = Mapping[tuple[str, int], Layout]
"""(recipe's name without its model, GPUs) -> layout of a published run, or one that is declared."""
Place = TypeVar("Place")


def plan(group: list[Case], published: Known, declared: Known) -> dict[Case, dict[int, Layout]]:
    """The layouts of a group of cases at each of their sizes, in GPUs."""
    allowed = _allowed(group, published, declared)
    everywhere = {}
    for case in {case for case, _ in allowed}:
        everywhere[case] = set.intersection(*(layouts for (of, _), layouts in allowed.items() if of == case))
    whole = _fewest({case: layouts for case, layouts in everywhere.items() if layouts})
    parts = _fewest({place: layouts for place, layouts in allowed.items() if place[0] not in whole}, whole.values())
    chosen: dict[Case, dict[int, Layout]] = defaultdict(dict)
    for case, gpus in allowed:
        chosen[case][gpus] = whole[case] if case in whole else parts[case, gpus]
    return {case: chosen[case] for case in group if case in chosen}


def _allowed(group: list[Case], published: Known, declared: Known) -> dict[tuple[Case, int], set[Layout]]:
    """Of each case and size, the layouts that are fast enough; the published one alone where it is, or else the one
    that is declared."""
    sizes = {gpu: _sizes(group, gpu, published, declared) for gpu in dict.fromkeys(c.gpu for c in group)}
    pool, fastest = _pool(group, sizes)
    pool |= {replace(layout, gbs=group[0].gbs) for layout in published.values()}
    allowed: dict[tuple[Case, int], set[Layout]] = {}
    for case in group:
        for gpus in sizes[case.gpu]:
            seconds = _seconds(case, gpus, pool) or dict(_fast(case, gpus))
            if not seconds:
                continue
            least = min([*seconds.values(), fastest.get((case, gpus), 1e9)])
            allowed[case, gpus] = {layout for layout, s in seconds.items() if s <= AS_FAST * least}
            # A published layout ran: it needs no room for surprises.
            for known, headroom in ((declared, HEADROOM), (published, 1.0)):
                kept = known.get((case.suffix, gpus))
                own = _seconds(case, gpus, {replace(kept, gbs=case.gbs)}, headroom) if kept else {}
                for layout, s in own.items():
                    if s <= kept_within(models.find(case.model).is_moe) * least:
                        allowed[case, gpus] = {layout}
    return allowed


@cache
def kept_within(is_moe: bool) -> float:
    """Published and declared layouts stay within so much of the fastest: twice the planner's mean error on tuned runs.

    The error is read where benchmarks/planner_accuracy.py has it put, in docs/planner.md.
    """
    name = "tuned, MoE" if is_moe else "tuned, dense"
    row = re.search(rf"^{name} +\d+ +\d+ +([\d.]+)%", ACCURACY.read_text(), re.MULTILINE)
    if row is None:
        raise UserError(f"{ACCURACY} has no row {name!r}", "put the table of benchmarks/planner_accuracy.py there")
    return 1 + 2 * float(row[1]) / 100


def _sizes(group: list[Case], gpu: str, published: Known, declared: Known) -> list[int]:
    """GPUs: the declared ones, or those of a new recipe; and the fewest of a published run that has as many."""
    suffixes = {case.suffix for case in group if case.gpu == gpu}
    ours = {gpus for suffix, gpus in declared if suffix in suffixes} or _new_sizes(group, gpu)
    theirs = sorted(gpus for suffix, gpus in published if suffix in suffixes and gpus >= min(ours, default=0))
    return sorted(ours | set(theirs[:1])) if ours else []


def _new_sizes(group: list[Case], gpu: str) -> set[int]:
    """GPUs: the fewest that a case of this GPU fits, and twice and four times that; pretraining eight times, too."""
    first = next(c for c in group if c.gpu == sized_as(gpu))
    for gpus in (2**i for i in range(3, 12)):
        if _fast(first, gpus):
            times = (1, 2, 4, 8) if first.task == "pretrain" else (1, 2, 4)
            return {gpus * t for t in times if gpus * t <= max(MOST_GPUS, gpus)}
    print(f"  nothing fits: {first.model} {first.suffix}", file=sys.stderr)
    return set()


@cache
def _fast(case: Case, gpus: int) -> tuple[tuple[Layout, float], ...]:
    """The layouts that fit, have a micro-batch for every stage and are as fast as the fastest of these, with their
    seconds; the fastest first."""
    longest = max(2 * case.seq // 4096, 1)
    space = Space(
        tp=(1, 2, 4, 8),
        cp=tuple(2**i for i in range(7) if 2**i <= longest),
        mbs=(1, 2, 4),
        sharding=(case.sharding,),
        max_vp=8,
        fixed={"pp": 1} if case.model.startswith("t5") else {},  # Megatron-Core 0.15.3: no pipeline of two halves
    )
    try:
        job = case.job(gpus)
        candidates = search(job, space, memory_cap_gib=HEADROOM * memory.limit(job) / 2**30)
    except UserError:
        return ()
    best = candidates.ranked[candidates.fields["pp"][candidates.ranked] <= MOST_STAGES][:400]
    best = [i for i in best if (layout := candidates.layout(int(i))).micro_batches(gpus) >= layout.pp]
    if not best:
        return ()
    least = float(candidates.seconds[best[0]])
    within = [int(i) for i in best if candidates.seconds[i] <= AS_FAST * least]
    return tuple((candidates.layout(i), float(candidates.seconds[i])) for i in within)


def forget_searches() -> None:
    """Free what the searches of a model hold."""
    _fast.cache_clear()


def _pool(group: list[Case], sizes: dict[str, list[int]]) -> tuple[set[Layout], dict[tuple[Case, int], float]]:
    """What may be chosen from: of each search the simplest of the fast ones; and each search's least seconds."""
    pool: set[Layout] = set()
    fastest = {}
    for case in group:
        if case.gpu not in searched() or case.precision not in SEARCHED_PRECISIONS:
            continue
        for gpus in sizes[case.gpu]:
            if fast := _fast(case, gpus):
                fastest[case, gpus] = fast[0][1]
                simplest = sorted(fast, key=lambda pair: (_features(pair[0]), pair[1]))[:SIMPLEST]
                pool |= {layout for layout, _ in simplest}
    return pool, fastest


def _features(layout: Layout) -> int:
    """What a reader has to understand in it."""
    odd = 4 * (layout.chunks is not None) + 2 * (layout.recompute == "full")
    odd += 2 * (layout.tp > 1 and not layout.sp)  # sequence parallelism sends no more, and holds less
    return odd + sum(getattr(layout, f.name) != f.default for f in fields(layout))


def _seconds(case: Case, gpus: int, pool: set[Layout], headroom: float = HEADROOM) -> dict[Layout, float]:
    """Step time of each layout that is legal, fits with its margin, and has a micro-batch for every stage."""
    layouts = list(pool)
    predictions = predict.many([case.job(gpus, layout) for layout in layouts])
    return {
        layout: p.step_time_s
        for layout, p in zip(layouts, predictions, strict=True)
        if p.verdict == "ok"
        and (p.reserved_gib_max or 0) <= headroom * p.limit_gib
        and p.step_time_s
        and layout.micro_batches(gpus) >= layout.pp
    }


def _fewest(allowed: Mapping[Place, set[Layout]], known: Iterable[Layout] = ()) -> dict[Place, Layout]:
    """One of the allowed layouts for each place, greedily as few different ones as it can; `known` are used anyway."""
    left, chosen = dict(allowed), {}
    used = set(known)
    while left:
        counts = Counter(layout for layouts in left.values() for layout in layouts)
        preferred = {layout: n for layout, n in counts.items() if layout in used} or counts
        best = min(preferred, key=lambda layout: (-preferred[layout] / (3 + _features(layout)), repr(layout)))
        for place in [place for place, layouts in left.items() if best in layouts]:
            chosen[place] = best
            del left[place]
    return chosen
