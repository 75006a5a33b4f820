"""The simulated step agrees with the pipeline bubble's formula and the plan."""

from dataclasses import replace
from itertools import pairwise

import pytest

from superpod.pages import step_timeline
from superpod.planner import columns
from superpod.planner.calibration import corrections
from superpod.planner.timing import steptime
from tests.pages.planning import job, search

EQUAL = [(p, v, m) for p in (1, 2, 4, 8) for v in (1, 2, 5) for m in (p, 2 * p, 6 * p) if p > 1 or v == 1]


@pytest.mark.parametrize(("p", "v", "m"), EQUAL)
def test_equal_stages_have_the_bubble_of_the_formula(p, v, m):
    """(p-1)/(v m) of the ideal time and (p-1)/(v m + p - 1) of the total: arXiv:2104.04473, section 2.2."""
    passes = {"forward": [{"compute": 0.3 / v}] * p, "backward": [{"compute": 0.5 / v, "recompute": 0.1 / v}] * p}
    step = step_timeline.simulate_passes(passes, m, vp=v)
    ideal = m * 0.9
    for rank in range(p):
        assert step.bubble_s[rank] / ideal == pytest.approx((p - 1) / (v * m), rel=1e-9, abs=1e-12)
        assert step.bubble_s[rank] / step.span_s == pytest.approx((p - 1) / (v * m + p - 1), rel=1e-9, abs=1e-12)


LAYOUTS = [
    {"tp": 2},
    {"tp": 4, "pp": 2, "sp": True},
    {"tp": 2, "pp": 4, "vp": 4, "sp": True, "recompute": "full"},
    {"tp": 2, "pp": 4, "cp": 2, "sp": True},
    {"pp": 8, "vp": 2, "recompute": "selective", "recompute_modules": ("mlp",)},
    {"sharding": "zero3"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_passes_add_up_to_the_plan(layout):
    """Every term of the slowest rank equals the plan's."""
    run = job(**layout)
    step, plan = step_timeline.simulate_step(run), steptime.step(run, columns.from_job(run))
    terms = {key: float(part) for key, part in plan.terms.items()}
    passes = run.micro_batches * (run.layout.vp or 1)
    both = [
        {key: passes * (f.get(key, 0.0) + b.get(key, 0.0)) for key in step_timeline.PASS_TERMS}
        for f, b in zip(step.passes["forward"], step.passes["backward"], strict=True)
    ]
    slowest = max(both, key=lambda parts: sum(parts.values()))
    for key in ("compute", "recompute", "tp", "cp", "ep"):
        assert slowest[key] == pytest.approx(terms[key], rel=1e-9, abs=1e-12)
    assert slowest["dp"] + step.after["dp"] == pytest.approx(terms["dp"], rel=1e-9, abs=1e-12)
    assert slowest["overhead"] + step.after["overhead"] == pytest.approx(terms["overhead"], rel=1e-9)
    pp = run.layout.pp
    assert slowest["pp_p2p"] / passes * (passes + pp - 1) == pytest.approx(terms["pp_p2p"], rel=1e-9, abs=1e-12)
    assert step.plan_s == pytest.approx(float(plan.seconds), rel=1e-9)
    assert step.step_s == pytest.approx(step.plan_s, rel=5e-3)


def test_the_timeline_has_the_plans_memory_stalls():
    waits = corrections.encode("h100", {"alloc_retries": 0.5, "full_from": 0.5})
    run = job(pp=4, vp=4, tp=2, sp=True)
    small = replace(run.node.gpu, calibrated_as=waits, hbm_usable_gib=20.0)  # so full that it does not even fit
    slow = run.replace(node=run.node.replace(gpu=small))
    fast = steptime.step(run, columns.from_job(run)).seconds
    plan = steptime.step(slow, columns.from_job(slow)).seconds
    assert plan > 1.5 * fast
    assert step_timeline.simulate_step(slow).step_s == pytest.approx(float(plan), rel=5e-3)


def test_a_slow_rank_delays_the_others():
    passes = {"forward": [{"compute": 1.0}] * 2 + [{"compute": 1.5}] * 2, "backward": [{"compute": 2.0}] * 4}
    step = step_timeline.simulate_passes(passes, 16)
    assert step.bubble_s[0] == pytest.approx(step.bubble_s[2] + 16 * 0.5)
    assert step.span_s >= 16 * 3.5


def test_passes_do_not_overlap_and_follow_their_inputs():
    step = step_timeline.simulate_step(job(tp=2, pp=4, vp=4, sp=True))
    ends = {(e.kind, e.chunk * 4 + e.stage, e.micro_batch): e for e in step.events}
    assert len(ends) == len(step.events) > 100
    for (kind, place, micro_batch), event in ends.items():
        before = ends.get((kind, place - (1 if kind == "forward" else -1), micro_batch))
        assert before is None or before.end <= event.start + 1e-12
    for rank in range(4):
        mine = [e for e in step.events if e.stage == rank]
        assert all(a.end <= b.start + 1e-12 for a, b in pairwise(mine))


def test_the_closed_form_is_an_upper_bound():
    """Unequal stages wait less than in the closed form, most if an early stage is the slowest."""
    result = next(iter(search().values()))
    runs = [result.job_at(int(i)) for i in result.best_per_degrees[:40]]
    equal = 0
    for run in runs:
        step = step_timeline.simulate_step(run)
        assert 0.9 * step.plan_s < step.step_s < step.plan_s * (1 + 1e-4), run.layout.short()
        equal += step.step_s > step.plan_s * (1 - 1e-9)
    assert equal > 10
