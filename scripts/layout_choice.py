"""Search layouts for a group of recipes, and select as few as keep each recipe within 3 % of its fastest layout."""

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
"""Layouts within this factor of the fastest count as equal: it is below the planner's error (docs/planner.md)."""
HEADROOM = 0.95
"""Fraction of the usable memory that a recipe may reserve; the rest is for unequal experts, buckets, a newer NCCL."""
MOST_STAGES = 32
"""Maximum pp: deeper pipelines run slower than planned, because every stage waits for the slowest."""
MOST_GPUS = 2048
SIMPLEST = 12
"""Number of layouts of each search that can be selected."""
ACCURACY = Path(__file__).resolve().parent.parent / "docs" / "planner.md"

Known = Mapping[tuple[str, int], Layout]
"""(recipe name without its model, GPUs) -> published or declared layout."""
Place = TypeVar("Place")


def plan(group: list[Case], published: Known, declared: Known) -> dict[Case, dict[int, Layout]]:
    """Return case -> GPUs -> layout for a group of cases at each of their sizes."""
    allowed = _allowed(group, published, declared)
    everywhere = {}
    for case in {case for case, _ in allowed}:
        everywhere[case] = set.intersection(*(layouts for (of, _), layouts in allowed.items() if of == case))
    for_case = _fewest({case: layouts for case, layouts in everywhere.items() if layouts})
    for_size = _fewest(
        {place: layouts for place, layouts in allowed.items() if place[0] not in for_case}, for_case.values()
    )
    chosen: dict[Case, dict[int, Layout]] = defaultdict(dict)
    for case, gpus in allowed:
        chosen[case][gpus] = for_case[case] if case in for_case else for_size[case, gpus]
    return {case: chosen[case] for case in group if case in chosen}


def _allowed(group: list[Case], published: Known, declared: Known) -> dict[tuple[Case, int], set[Layout]]:
    """Return (case, GPUs) -> layouts that are fast enough: only the published one if it is, else the declared one, else
    all."""
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
            # A published layout has run, so it needs no headroom.
            for known, headroom in ((declared, HEADROOM), (published, 1.0)):
                kept = known.get((case.suffix, gpus))
                own = _seconds(case, gpus, {replace(kept, gbs=case.gbs)}, headroom) if kept else {}
                for layout, s in own.items():
                    if s <= kept_within(models.find(case.model).is_moe) * least:
                        allowed[case, gpus] = {layout}
    return allowed


@cache
def kept_within(is_moe: bool) -> float:
    """Return the factor of the fastest time within which published and declared layouts are kept.

    It is 1 + twice the planner's mean error on tuned runs, from the table in docs/planner.md.
    """
    name = "tuned, MoE" if is_moe else "tuned, dense"
    row = re.search(rf"^{name} +\d+ +\d+ +([\d.]+)%", ACCURACY.read_text(), re.MULTILINE)
    if row is None:
        raise UserError(f"{ACCURACY} has no row {name!r}", "insert the table of benchmarks/planner_accuracy.py")
    return 1 + 2 * float(row[1]) / 100


def _sizes(group: list[Case], gpu: str, published: Known, declared: Known) -> list[int]:
    """Return the sizes in GPUs: declared or new ones, and the smallest published one that is not below these."""
    suffixes = {case.suffix for case in group if case.gpu == gpu}
    ours = {gpus for suffix, gpus in declared if suffix in suffixes} or _new_sizes(group, gpu)
    theirs = sorted(gpus for suffix, gpus in published if suffix in suffixes and gpus >= min(ours, default=0))
    return sorted(ours | set(theirs[:1])) if ours else []


def _new_sizes(group: list[Case], gpu: str) -> set[int]:
    """Return the fewest GPUs on which a case fits, x 2 and x 4, in pretraining also x 8."""
    first = next(c for c in group if c.gpu == sized_as(gpu))
    for gpus in (2**i for i in range(3, 12)):
        if _fast(first, gpus):
            times = (1, 2, 4, 8) if first.task == "pretrain" else (1, 2, 4)
            return {gpus * t for t in times if gpus * t <= max(MOST_GPUS, gpus)}
    print(f"  no layout fits: {first.model} {first.suffix}", file=sys.stderr)
    return set()


@cache
def _fast(case: Case, gpus: int) -> tuple[tuple[Layout, float], ...]:
    """Return (layout, seconds) of the layouts that fit, fill the pipeline and are within AS_FAST of the fastest, which
    comes first."""
    longest = max(2 * case.seq // 4096, 1)
    space = Space(
        tp=(1, 2, 4, 8),
        cp=tuple(2**i for i in range(7) if 2**i <= longest),
        mbs=(1, 2, 4),
        sharding=(case.sharding,),
        max_vp=8,
        fixed={"pp": 1}
        if case.model.startswith("t5")
        else {},  # Megatron-Core 0.15.3: no pipeline for encoder-decoder models
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
    """Free the cached searches of a model."""
    _fast.cache_clear()


def _pool(group: list[Case], sizes: dict[str, list[int]]) -> tuple[set[Layout], dict[tuple[Case, int], float]]:
    """Return the simplest of the fast layouts of each search, and (case, GPUs) -> seconds of the fastest."""
    pool: set[Layout] = set()
    fastest = {}
    for case in group:
        if case.gpu not in searched() or case.precision not in SEARCHED_PRECISIONS:
            continue
        for gpus in sizes[case.gpu]:
            if fast := _fast(case, gpus):
                fastest[case, gpus] = fast[0][1]
                simplest = sorted(fast, key=lambda pair: (_complexity(pair[0]), pair[1]))[:SIMPLEST]
                pool |= {layout for layout, _ in simplest}
    return pool, fastest


def _complexity(layout: Layout) -> int:
    """Return how complex a layout is: its non-default fields, weighted."""
    odd = 4 * (layout.chunks is not None) + 2 * (layout.recompute == "full")
    odd += 2 * (layout.tp > 1 and not layout.sp)  # sequence parallelism needs less memory for the same traffic
    return odd + sum(getattr(layout, f.name) != f.default for f in fields(layout))


def _seconds(case: Case, gpus: int, pool: set[Layout], headroom: float = HEADROOM) -> dict[Layout, float]:
    """Return layout -> step time for the layouts that are legal, fit with headroom, and fill the pipeline."""
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
    """Return place -> one of its allowed layouts, with few distinct layouts (greedy); `known` layouts are preferred."""
    left, chosen = dict(allowed), {}
    used = set(known)
    while left:
        counts = Counter(layout for layouts in left.values() for layout in layouts)
        preferred = {layout: n for layout, n in counts.items() if layout in used} or counts
        best = min(preferred, key=lambda layout: (-preferred[layout] / (3 + _complexity(layout)), repr(layout)))
        for place in [place for place, layouts in left.items() if best in layouts]:
            chosen[place] = best
            del left[place]
    return chosen
