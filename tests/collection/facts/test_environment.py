"""Test options that set environment variables of NCCL, such as `with=nccl_debug`."""

import pytest

from superpod.collection.facts import environment
from superpod.errors import UserError
from superpod.nemo2 import options
from superpod.requests import deferred
from superpod.requests.request import Request
from superpod.slurm.profiles import profiles
from superpod.slurm.script import cluster_variables as of_cluster
from tests.slurm.jobs import planned


def of(*overrides: str, **job) -> dict[str, str]:
    variables = environment.variables(planned(**job), overrides)
    assert len({v.name for v in variables}) == len(variables)
    return {v.name: v.value for v in variables}


@pytest.mark.parametrize("name", environment.OPTIONS)
def test_option_adds_its_variables_and_keeps_the_others(name):
    plain, special = of(), of(f"with={name}")
    wanted = {v.name: v.value for v in environment.OPTIONS[name]}
    assert special == plain | wanted
    assert special != plain
    assert all(v.reason.startswith(f"{name}: ") for v in environment.OPTIONS[name])
    assert name in options.OPTIONS


def test_options_can_be_combined_and_other_overrides_add_nothing():
    both = of("with=nccl_debug, nccl_simple_ring", "with=fsdp", "trainer.max_steps=3")
    assert both["NCCL_DEBUG"] == "INFO"
    assert both["NCCL_ALGO"] == "Ring"
    assert of("with=fsdp", "nccl_debug=1") == of()


def test_forced_ring_replaces_the_algorithm_of_deterministic():
    assert of(options={"deterministic": True})["NCCL_ALGO"] == "^NVLS"
    assert of("with=nccl_simple_ring", options={"deterministic": True})["NCCL_ALGO"] == "Ring"


def test_cluster_variables_take_precedence_over_options():
    cluster = profiles.load("dgx_h100")
    variables = of_cluster.variables(cluster, planned(cluster.gpu), ["with=nccl_debug"])
    (level,) = [v for v in variables if v.name == "NCCL_DEBUG"]
    assert (level.value, level.reason[:11]) == ("INFO", "nccl_debug:")


def test_build_refuses_environment_options():
    with pytest.raises(UserError, match="variables of the ranks") as refused:
        environment.refuse_in_configuration("fsdp, nccl_simple_ring")
    assert "NCCL_ALGO=Ring NCCL_PROTO=Simple" in refused.value.hint
    environment.refuse_in_configuration("fsdp,deterministic")


def test_options_are_planned_without_nemo():
    run = deferred.plan_run(Request("llama3_8b_pretrain_h100_bf16", ("with=nccl_debug",)))
    assert run.job == deferred.plan_run(Request("llama3_8b_pretrain_h100_bf16")).job
    with pytest.raises(UserError, match="can only be determined with NeMo"):
        deferred.plan_run(Request("llama3_8b_pretrain_h100_bf16", ("with=nccl_debug,fsdp",)))


def test_options_have_warnings():
    assert "for comparison" in options.warnings(["with=nccl_simple_ring"])[0]
