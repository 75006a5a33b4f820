"""Points of the map, their frontier and names."""

import numpy as np

from superpod.pages import layout_points, page_data
from superpod.planner.formats import option_syntax
from superpod.planner.hardware import GIB
from superpod.planner.layout import Layout
from tests.pages.planning import search


def read(column):
    import base64

    return np.frombuffer(base64.b64decode(column["base64"]), dtype=column["type"])


def test_the_frontier_is_pareto_optimal():
    rng = np.random.default_rng(3)
    gib, seconds = rng.integers(1, 40, 300) * 1.0, rng.integers(1, 40, 300) * 1.0
    edge = layout_points.frontier(gib, seconds)
    both = [*zip(gib, seconds, strict=True)]
    optimal = {(g, s) for g, s in both if not np.any((gib <= g) & (seconds <= s) & ((gib < g) | (seconds < s)))}
    assert {(gib[i], seconds[i]) for i in edge} == optimal
    assert [*gib[edge]] == sorted(gib[edge])


def test_the_fastest_layout_of_every_cell_is_drawn():
    searches = search()
    points = layout_points.map_points(searches)
    result = next(iter(searches.values()))
    columns = {key: read(column) for key, column in points["columns"].items()}
    assert points["all"] == len(result) > len(columns["gib"]) > 1000
    assert columns["seconds"].min() == np.float32(result.seconds.min())
    best = int(result.ranked[0])
    shown = [(np.float32(s), np.float32(g)) for s, g in zip(columns["seconds"], columns["gib"], strict=True)]
    assert (np.float32(result.seconds[best]), np.float32(result.reserved[best] / GIB)) in shown
    places = {(round(np.log10(g) * 1000), round(np.log10(s) * 1000)) for s, g in shown}
    assert len(places) > 0.95 * len(shown)  # but for rounding at the edge of a place


def test_large_plans_use_coarser_cells(monkeypatch):
    searches = search()
    every = len(read(layout_points.map_points(searches)["columns"]["gib"]))
    monkeypatch.setattr(layout_points, "MAX_POINTS", int(0.7 * every))
    few = layout_points.map_points(searches)
    assert 1000 < len(read(few["columns"]["gib"])) <= 0.7 * every
    assert few["all"] == len(next(iter(searches.values())))


def test_fitting_layouts_are_drawn_last():
    fits = read(layout_points.map_points(search())["columns"]["fits"])
    assert 0 < fits.sum() < len(fits)
    assert [*fits] == sorted(fits)


def test_arrays_use_the_smallest_type():
    for values, kind in (([0, 255], "uint8"), ([256], "uint16"), ([70_000], "uint32"), ([0.5], "float32")):
        packed = page_data.pack_array(np.array(values))
        assert packed["type"] == kind
        assert [*read(packed)] == values
    assert [*read(page_data.pack_array(np.array([], dtype=int)))] == []


def test_the_option_of_a_layout_round_trips():
    """`--layout` turns SP on if TP is above 1, so a layout without SP needs sp=false."""
    result = next(iter(search().values()))
    layouts = [result.layout(i) for i in range(0, len(result), 7)]
    assert any(x.tp > 1 and not x.sp for x in layouts)
    for x in layouts:
        assert option_syntax.change_layout(Layout(gbs=x.gbs), layout_points.option(x)) == x
