"""`recipes submit` and `render`: errors before NeMo is imported."""

import pytest

from superpod.cli.cluster import render, submit
from superpod.errors import UserError
from superpod.slurm.profiles import live_cluster
from superpod.slurm.submission import request_checks


@pytest.fixture(autouse=True)
def without_nemo(monkeypatch):
    def resolved(_request):
        raise AssertionError("NeMo would be imported")

    monkeypatch.setattr(request_checks, "resolve_request", resolved)


@pytest.mark.parametrize(
    ("recipe", "says", "instead"),
    [
        (
            "llama3_8b_pretrain_b200_bf16",
            "a recipe for b200 does not fit on h100",
            "next: llama3_8b_pretrain_h100_bf16",
        ),
        ("llama3_8b_pretrain_b200_mxfp8", "h100 does not support mxfp8", "next: recipes list llama3_8b pretrain h100"),
    ],
)
def test_a_recipe_for_another_gpu_is_refused(recipe, says, instead):
    for verb in (render.render, submit.submit):
        with pytest.raises(UserError, match=says) as refused:
            verb(name=recipe, cluster="dgx_h100")
        assert instead in str(refused.value)


def test_a_sequence_length_that_does_not_fit_is_refused_with_a_layout_that_fits():
    for verb in (render.render, submit.submit):
        with pytest.raises(UserError, match="does not fit on h100") as refused:
            verb(name="llama3_8b_pretrain_h100_bf16", cluster="dgx_h100", seq=131072)
        assert "--layout auto selects TP2 CP4 SP" in str(refused.value)
    with pytest.raises(AssertionError, match="NeMo would be imported"):
        render.render(name="llama3_8b_pretrain_h100_bf16", cluster="dgx_h100", seq=131072, layout="auto")


def test_a_folder_that_pyxis_cannot_mount_is_refused():
    for verb in (render.render, submit.submit):
        with pytest.raises(UserError, match=r"contains ','(.|\n)*--runs"):
            verb(name="llama3_8b_pretrain_h100_bf16", cluster="dgx_h100", runs="/lustre/a,b:c d")


@pytest.mark.parametrize(
    ("recipe", "overrides"), [("llama3_8b_pretrain_h100_bf16", []), ("llama3_8b_pretrain_b200_bf16", ["with=fsdp"])]
)
def test_other_recipes_are_built(recipe, overrides):
    with pytest.raises(AssertionError, match="NeMo would be imported"):
        render.render(name=recipe, cluster="dgx_h100", overrides=overrides)


def test_an_unreachable_controller_is_reported_before_the_build(monkeypatch):
    def ask(*_facts):
        raise UserError("Slurm's controller does not answer")

    monkeypatch.setattr(live_cluster, "query_cluster", ask)
    with pytest.raises(UserError, match="does not answer"):
        submit.submit(name="llama3_8b_pretrain_h100_bf16", cluster="dgx_h100")
