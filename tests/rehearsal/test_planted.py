"""Layout bugs, planted: `recipes check` finds those that the numbers show, a rehearsal those that only a run shows."""

import dataclasses
import re

import pytest

from superpod.planner import hardware, legality, models
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob


def job(model="llama3_8b", gpus=16, seq=8192, options=None, **layout):
    node = hardware.builtin().node("h100")
    whole = {"tp": 2, "pp": 4, "sp": True, "gbs": 64} | layout
    made = PlannedJob(models.find(model), node, hardware.builtin().fabric_of(node), gpus, seq, "bf16", Layout(**whole))
    return made.replace(options=dataclasses.replace(made.options, **options)) if options else made


SHOWN_BY_NUMBERS = {
    "heads-over-tp": (job(tp=3, gpus=12), "heads 32 must be divisible by tp 3"),
    "groups-over-tp": (job(tp=16, gpus=64), "kv_heads 8 must be divisible by tp 16"),
    "experts-over-ep": (job("mixtral_8x7b", ep=3, gpus=24, etp=1), "experts 8 must be divisible by ep 3"),
    "layers-over-stages": (job(pp=5, gpus=10), "32 layers"),
    "wrong-vp": (job(vp=3), "the 8 layers of pipeline rank 0 must be divisible by vp 3"),
    "vp-without-stages": (job(pp=1, vp=2), "vp 2 requires pipeline parallelism, but pp is 1"),
    "a-stage-drops-a-layer": (job(chunks=(8, 8, 8, 7)), "numbers that add up to 32 layers"),
    "missing-sp": (job("mixtral_8x7b", sp=False), "experts with tp 2 require sequence parallelism"),
    "sp-without-tp": (job(tp=1, pp=4), "requires tensor parallelism, but tp is 1"),
    "crossed-sends": (job(pp=2, vp=2, options={"overlap_p2p": False}), "silently wrong"),
    "sequence-over-cp": (job(cp=2, seq=8190), "2 x cp 2 = 4, not 8190"),
    "sequence-over-tp": (job(tp=8, seq=8196, gpus=32), "tp 8 x cp 1 = 8, not 8196"),
    "batch-over-ranks": (job(gbs=63), "gbs 63 must be a multiple of mbs 1 x dp 2 = 2"),
    "too-few-micro-batches": (job(vp=2, gbs=12), "must be a multiple of pp 4"),
    "world-over-degrees": (job(gpus=20), "must divide the number of GPUs, which is 20"),
    "expert-grid": (job("mixtral_8x7b", ep=8), "ep 8 x etp 2 = 16 must divide tp x cp x dp = 4"),
    "recomputed-groups": (job(recompute="full", recompute_layers=3), "recompute_layers 3 must divide"),
}


@pytest.mark.parametrize("name", SHOWN_BY_NUMBERS)
def test_check_says_what_is_wrong(name):
    planted, says = SHOWN_BY_NUMBERS[name]
    violations = legality.violations(planted)
    assert any(says in broken.message for broken in violations), violations
    assert all(broken.fix for broken in violations if says in broken.message)


def test_what_they_are_planted_in_is_legal():
    assert legality.violations(job()) == []
    assert legality.violations(job("mixtral_8x7b")) == []


# Name in planted_bugs.py: which check of the rehearsal fails, and what it says.
LOSSES = "one rank's losses, fp32"
# Sends that cross (no overlapped p2p with PP 2 and VP) are left to the planner's rule above.
SHOWN_BY_A_RUN = {
    "same-data": ("data", "data-parallel ranks 0 and 1 received the same samples"),
    "layer-left-out": ("run fp32", "the stages do not contain each of 4 layers exactly once"),
    "layer-twice": ("run fp32", "the stages do not contain each of 4 layers exactly once"),
    "untied-embedding": ("replicas agree", "the tied embedding differs between rank"),
    "contiguous-chunks": ("data", "received positions 0-"),
    "keys-not-gathered": (LOSSES, "from step 1 on: the forward pass"),
    "unreduced-norms": ("replicas agree", "layer_norm_weight differs between rank"),
    "unreduced-router": ("replicas agree", "router.weight differs between rank"),
    "unreduced-gradients": (LOSSES, "from step 2 on: the gradients differ"),
    "idle-stage": ("every rank took part", "did not train"),
    "forgotten-moments": ("resumed", "from step 2 on: the optimizer was not restored"),
    "data-from-start": ("resumed", "from step 1 on: weights or data were not restored"),
    "experts-scaled": ("one rank's gradient norms, fp32", "from step 1 on: the gradients differ"),
    "adapters-not-saved": ("saved", "0 adapter matrices are in the checkpoint"),
}
QUICK = ("same-data", "untied-embedding")

# What ends a run by itself, and who is to blame.
ENDED_BY = {
    "dying-rank": "^rank 3 was killed by signal 9$",
    "stuck-rank": r"rank 3 on \S+ is stuck in train since step 0, \d+ s ago, before the others",
    "nan-loss": r"rank \d failed: .*(NaN|nan)",
}


def planted_bugs(names):
    quick, other = pytest.mark.slow, pytest.mark.long
    return [pytest.param(name, id=name, marks=quick if name in QUICK else other) for name in names]


@pytest.mark.nemo
@pytest.mark.train
@pytest.mark.parametrize("planted", planted_bugs(SHOWN_BY_A_RUN), indirect=True)
def test_a_rehearsal_says_what_is_wrong(planted):
    check, says = SHOWN_BY_A_RUN[planted["name"]]
    assert says in planted["failed"].get(check, ""), planted


@pytest.mark.nemo
@pytest.mark.train
@pytest.mark.parametrize("planted", planted_bugs(ENDED_BY), indirect=True)
def test_a_run_that_breaks_ends_by_itself_and_names_the_rank(planted):
    (message,) = planted["failed"].values()
    assert re.search(ENDED_BY[planted["name"]], message), planted
    assert sum(planted["seconds"].values()) < 300


def test_there_are_twenty():
    assert len(SHOWN_BY_NUMBERS) + len(SHOWN_BY_A_RUN) >= 20
