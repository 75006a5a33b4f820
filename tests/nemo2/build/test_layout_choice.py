"""Test that `scripts/plan_layouts.py` keeps declared layouts within the error of the planner."""

import importlib
import sys

import pytest

from superpod.collection import layout_text, registry
from superpod.planner.layout import Layout
from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
cases, choice, plan_layouts = map(importlib.import_module, ("layout_cases", "layout_choice", "plan_layouts"))
GPUS = 8


@pytest.fixture(scope="module")
def case():
    """Return the case of Llama 3 8B on one H100 node, where half of the layouts do not fit."""
    return cases.Case("llama3_8b", "sft", 0, "h100", "bf16")


@pytest.fixture(scope="module")
def fast(case):
    """Return the fitting layouts of the case by their step time relative to the fastest."""
    layouts = {
        Layout(tp=tp, pp=pp, cp=cp, sp=tp > 1, gbs=case.gbs, sharding=case.sharding)
        for tp in (1, 2, 4, 8)
        for pp in (1, 2, 4)
        for cp in (1, 2)
        if tp * pp * cp <= GPUS
    }
    seconds = choice._seconds(case, GPUS, layouts)
    least = choice._fast(case, GPUS)[0][1]
    return {layout: s / least for layout, s in seconds.items()}


def chosen(case, *, published=None, declared=None):
    known = ({(case.suffix, GPUS): layout} if layout else {} for layout in (published, declared))
    return choice.plan([case], *known)[case][GPUS]


def test_keeps_declared_layout_within_twice_the_planner_error(case, fast):
    most = choice.kept_within(is_moe=False)
    kept = [layout for layout, times in fast.items() if choice.AS_FAST < times <= most]
    slow = [layout for layout, times in fast.items() if times > most]
    assert kept
    assert slow
    for layout in kept:
        assert chosen(case, declared=layout) == layout != chosen(case)
    for layout in slow:
        assert chosen(case, declared=layout) == chosen(case)


def test_replaces_declared_layout_that_does_not_fit(case):
    alone = Layout(gbs=case.gbs, sharding=case.sharding, mbs=4)
    assert choice._seconds(case, GPUS, {alone}) == {}
    assert chosen(case, declared=alone) == chosen(case)


def test_published_layout_takes_precedence(case, fast):
    published, declared = sorted((layout for layout in fast if fast[layout] < 1.09), key=repr)[:2]
    assert chosen(case, published=published, declared=declared) == published


def test_reads_declared_layouts_by_gpus():
    known = plan_layouts.declared(layout_text.read(registry.LAYOUTS / "llama3_8b.toml"))
    for (suffix, gpus), layout in known.items():
        recipe = registry.find(f"llama3_8b_{suffix}")
        assert layout == recipe.layout(gpus // recipe.gpus_per_node)
    assert len(known) == sum(len(r.nodes) for r in registry.recipes().values() if r.model.name == "llama3_8b")
