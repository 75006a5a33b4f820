"""All legal layouts of a plan as points: step time against memory, and what the page needs to name each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from superpod.pages.packing import column
from superpod.planner import explain
from superpod.planner.arrays import Array, Column
from superpod.planner.formats import option_syntax
from superpod.planner.hardware import GIB
from superpod.planner.layout import SHARDINGS, Layout
from superpod.planner.search import SearchResult

DEGREES = ("tp", "pp", "vp", "cp", "ep", "etp", "mbs", "sp")
RECOMPUTATION = ("recompute", "recompute_method", "recompute_layers", "recompute_modules")
CELLS = (1000, 700, 500, 350, 250, 180)
"""Of layouts that lie within 1/1000 of a decade in both figures, one is drawn, the fastest; of very many, more."""
MOST = 80_000
"""Points of a map: more make a page of over 5 MB that opens slowly."""


def of(searches: Mapping[str, SearchResult]) -> dict[str, Any]:
    """The points of all precisions, as `assets/map.js` reads them."""
    words = _Words()
    parts = [_points(search, i, words) for i, search in enumerate(searches.values())]
    whole = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    gib, seconds = (np.concatenate([figure(search) for search in searches.values()]) for figure in (_gib, _seconds))
    shown = _one_of_each_cell(gib, seconds)
    order = shown[np.lexsort((-seconds[shown], whole["fits"][shown]))]  # what fits is drawn last
    edge = frontier(gib, seconds)
    table = {"gib": gib, "seconds": seconds, **whole}
    first = next(iter(searches.values()))
    return {
        "columns": {key: column(values[order]) for key, values in table.items()},
        "frontier": {"gib": gib[edge].tolist(), "seconds": seconds[edge].tolist()},
        "limit_gib": first.cap / GIB,
        "tokens_per_gpu": first.job.tokens / first.job.gpus,
        "all": len(gib),
        "words": {"precision": list(searches), **words.lists},
    }


def _gib(search: SearchResult) -> Array:
    return search.reserved / GIB


def _seconds(search: SearchResult) -> Array:
    return search.seconds


def option(layout: Layout) -> str:
    """The value of `--layout` that means this layout, also where it has no SP: a tp above 1 turns that on."""
    text = option_syntax.as_option(layout)
    return text if layout.sp or layout.tp == 1 else f"{text},sp=false"


def frontier(gib: Array, seconds: Array) -> Column:
    """Indices of the points that no other beats in both figures, by memory."""
    order = np.lexsort((seconds, gib))
    best = np.minimum.accumulate(seconds[order])
    return order[np.flatnonzero(np.diff(best, prepend=np.inf) < 0)]


def _one_of_each_cell(gib: Array, seconds: Array) -> Column:
    """Indices of the points drawn: pixels hold no more."""
    fastest = np.argsort(seconds, kind="stable")
    shown = fastest
    for a_decade in CELLS:
        cells = [np.rint(np.log10(values[fastest]) * a_decade).astype(np.int64) for values in (gib, seconds)]
        code = (cells[0] - cells[0].min()) * (int(np.ptp(cells[1])) + 1) + cells[1] - cells[1].min()
        shown = fastest[np.unique(code, return_index=True)[1]]
        if len(shown) <= MOST:
            break
    return shown


class _Words:
    """How the page names what is no number: a list for each kind of it, as (title, option)."""

    def __init__(self) -> None:
        self.lists: dict[str, list[tuple[str, str]]] = {"split": [], "recompute": [], "sharding": []}

    def index(self, key: str, layout: Layout) -> int:
        """The place in list `key` of what this layout, which has nothing else, is called."""
        option = option_syntax.as_option(layout)
        entry = (explain.title(layout).partition("mbs 1")[2].removeprefix(", "), "" if option == "tp=1" else option)
        if entry not in self.lists[key]:
            self.lists[key].append(entry)
        return self.lists[key].index(entry)


def _only_split(layout: Layout) -> Layout:
    """A layout that says nothing but which stage holds which layers."""
    plain = Layout()
    others = (*DEGREES, "gbs", *RECOMPUTATION, "sharding")
    return layout.replace(**{key: getattr(plain, key) for key in others})


def _points(search: SearchResult, precision: int, words: _Words) -> dict[str, Column]:
    fields = search.fields
    used, first = np.unique(fields["split"], return_index=True)
    splits = dict(zip(used.tolist(), (_only_split(search.layout(int(i))) for i in first), strict=True))
    recomputes = [Layout().replace(**dict(zip(RECOMPUTATION, r, strict=True))) for r in search.recompute_options]
    named = {
        "split": (fields["split"], [splits.get(i, Layout()) for i in range(len(search.splits))]),
        "recompute": (fields["recompute_option"], recomputes),
        "sharding": (fields["sharding"], [Layout(sharding=name) for name in SHARDINGS]),
    }
    return {
        "fits": search.fits.astype(np.int64),
        "precision": np.full(len(search), precision),
        **{key: fields[key] for key in DEGREES},
        **{key: np.array([words.index(key, x) for x in those])[at] for key, (at, those) in named.items()},
    }
