"""Computes the points on the map of a plan: step time, memory and description of all legal layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from superpod.pages.page_data import pack_array
from superpod.planner import explain
from superpod.planner.arrays import Array, Column
from superpod.planner.formats import option_syntax
from superpod.planner.hardware import GIB
from superpod.planner.layout import SHARDINGS, Layout
from superpod.planner.search import SearchResult

DEGREES = ("tp", "pp", "vp", "cp", "ep", "etp", "mbs", "sp")
RECOMPUTATION = ("recompute", "recompute_method", "recompute_layers", "recompute_modules")
CELLS = (1000, 700, 500, 350, 250, 180)
"""Grid cells per decade of both axes, from which the finest possible is used; a cell shows only its fastest layout."""
MAX_POINTS = 80_000
"""Maximum number of points: with more, the page exceeds 5 MB and opens slowly."""


def map_points(searches: Mapping[str, SearchResult]) -> dict[str, Any]:
    """Return the points of all precisions in the format of `assets/plan/map.js`.

    `searches` maps each precision to its search result.
    """
    names = _Names()
    parts = [_describe_layouts(search, i, names) for i, search in enumerate(searches.values())]
    columns = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    gib = np.concatenate([search.reserved for search in searches.values()]) / GIB
    seconds = np.concatenate([search.seconds for search in searches.values()])
    shown_points = _select_points(gib, seconds)
    # Layouts that fit are drawn last.
    order = shown_points[np.lexsort((-seconds[shown_points], columns["fits"][shown_points]))]
    edge = frontier(gib, seconds)
    table = {"gib": gib, "seconds": seconds, **columns}
    first = next(iter(searches.values()))
    return {
        "columns": {key: pack_array(values[order]) for key, values in table.items()},
        "frontier": {"gib": gib[edge].tolist(), "seconds": seconds[edge].tolist()},
        "limit_gib": first.cap / GIB,
        "tokens_per_gpu": first.job.tokens / first.job.gpus,
        "all": len(gib),
        "words": {"precision": list(searches), **names.lists},
    }


def option(layout: Layout) -> str:
    """Return the value of the option `--layout` for a layout; TP above 1 without SP needs an explicit sp=false."""
    text = option_syntax.format_layout(layout)
    if layout.sp or layout.tp == 1:
        return text
    return f"{text},sp=false"


def frontier(gib: Array, seconds: Array) -> Column:
    """Return the indices of the layouts on the Pareto frontier of memory and step time, sorted by memory."""
    order = np.lexsort((seconds, gib))
    best = np.minimum.accumulate(seconds[order])
    return order[np.flatnonzero(np.diff(best, prepend=np.inf) < 0)]


def _select_points(gib: Array, seconds: Array) -> Column:
    """Return the indices of the points to draw, at most about one per pixel."""
    time_order = np.argsort(seconds, kind="stable")
    shown_points = time_order
    for cells_per_decade in CELLS:
        cells = [np.rint(np.log10(values[time_order]) * cells_per_decade).astype(np.int64) for values in (gib, seconds)]
        code = (cells[0] - cells[0].min()) * (int(np.ptp(cells[1])) + 1) + cells[1] - cells[1].min()
        shown_points = time_order[np.unique(code, return_index=True)[1]]
        if len(shown_points) <= MAX_POINTS:
            break
    return shown_points


class _Names:
    """Names of the non-numeric settings of layouts: a list of (title, `--layout` value) per kind of setting."""

    def __init__(self) -> None:
        self.lists: dict[str, list[tuple[str, str]]] = {"split": [], "recompute": [], "sharding": []}

    def index(self, key: str, layout: Layout) -> int:
        """Return the index in list `key` of a layout that has only this setting; add the layout if it is missing."""
        option = option_syntax.format_layout(layout)
        entry = (explain.title(layout).partition("mbs 1")[2].removeprefix(", "), "" if option == "tp=1" else option)
        if entry not in self.lists[key]:
            self.lists[key].append(entry)
        return self.lists[key].index(entry)


def _keep_partition(layout: Layout) -> Layout:
    """Return the layout with default values, except for the partition of layers into pipeline stages."""
    default_layout = Layout()
    other_fields = (*DEGREES, "gbs", *RECOMPUTATION, "sharding")
    return layout.replace(**{key: getattr(default_layout, key) for key in other_fields})


def _describe_layouts(search: SearchResult, precision: int, names: _Names) -> dict[str, Column]:
    """Return columns with the settings of all layouts; non-numeric ones are indices into the lists of `names`."""
    fields = search.fields
    used, first = np.unique(fields["split"], return_index=True)
    splits = dict(zip(used.tolist(), (_keep_partition(search.layout(int(i))) for i in first), strict=True))
    recomputes = [Layout().replace(**dict(zip(RECOMPUTATION, r, strict=True))) for r in search.recompute_options]
    field_names = {
        "split": (fields["split"], [splits.get(i, Layout()) for i in range(len(search.splits))]),
        "recompute": (fields["recompute_option"], recomputes),
        "sharding": (fields["sharding"], [Layout(sharding=name) for name in SHARDINGS]),
    }
    return {
        "fits": search.fits.astype(np.int64),
        "precision": np.full(len(search), precision),
        **{key: fields[key] for key in DEGREES},
        **{key: np.array([names.index(key, x) for x in layouts])[at] for key, (at, layouts) in field_names.items()},
    }
