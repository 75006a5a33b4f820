"""NCCL's settings for a purpose: `with=nccl_debug`, and what they leave alone."""

import pytest

from superpod.collection.facts import environment
from superpod.errors import UserError
from superpod.nemo2 import options
from superpod.requests import deferred
from superpod.requests.request import Request
from superpod.slurm.profiles import profiles
from superpod.slurm.script import environment as of_cluster
from tests.slurm.jobs import planned


def of(*overrides: str, **job) -> dict[str, str]:
    variables = environment.variables(planned(**job), overrides)
    assert len({v.name for v in variables}) == len(variables)
    return {v.name: v.value for v in variables}


@pytest.mark.parametrize("name", environment.PURPOSES)
def test_a_purpose_adds_its_variables_and_keeps_the_others(name):
    plain, special = of(), of(f"with={name}")
    wanted = {v.name: v.value for v in environment.PURPOSES[name]}
    assert special == plain | wanted
    assert special != plain
    assert all(v.reason.startswith(f"{name}: ") for v in environment.PURPOSES[name])
    assert name in options.OPTIONS


def test_several_purposes_stand_together_and_any_other_override_adds_nothing():
    both = of("with=nccl_debug, nccl_simple_ring", "with=fsdp", "trainer.max_steps=3")
    assert both["NCCL_DEBUG"] == "INFO"
    assert both["NCCL_ALGO"] == "Ring"
    assert of("with=fsdp", "nccl_debug=1") == of()


def test_a_forced_ring_takes_the_place_of_what_determinism_sets():
    assert of(options={"deterministic": True})["NCCL_ALGO"] == "^NVLS"
    assert of("with=nccl_simple_ring", options={"deterministic": True})["NCCL_ALGO"] == "Ring"


def test_a_cluster_writes_them_with_their_reasons_and_its_own_still_win():
    cluster = profiles.load("dgx_h100")
    variables = of_cluster.variables(cluster, planned(cluster.gpu), ["with=nccl_debug"])
    (level,) = [v for v in variables if v.name == "NCCL_DEBUG"]
    assert (level.value, level.reason[:11]) == ("INFO", "nccl_debug:")


def test_python_says_that_a_configuration_cannot_hold_them():
    with pytest.raises(UserError, match="variables of the ranks") as refused:
        environment.refuse_in_configuration("fsdp, nccl_simple_ring")
    assert "NCCL_ALGO=Ring NCCL_PROTO=Simple" in refused.value.hint
    environment.refuse_in_configuration("fsdp,deterministic")


def test_without_nemo_they_are_planned_like_any_other_variable():
    run = deferred.plan_run(Request("llama3_8b_pretrain_h100_bf16", ("with=nccl_debug",)))
    assert run.job == deferred.plan_run(Request("llama3_8b_pretrain_h100_bf16")).job
    with pytest.raises(UserError, match="can only be determined with NeMo"):
        deferred.plan_run(Request("llama3_8b_pretrain_h100_bf16", ("with=nccl_debug,fsdp",)))


def test_a_warning_says_what_they_cost():
    assert "to compare" in options.warnings(["with=nccl_simple_ring"])[0]
