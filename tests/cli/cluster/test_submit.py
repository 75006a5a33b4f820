"""`recipes submit` and `render`: what is refused before NeMo is imported."""

import pytest

from superpod.cli.cluster import render, submit
from superpod.errors import UserError
from superpod.slurm.profiles import live_cluster


@pytest.fixture(autouse=True)
def without_nemo(monkeypatch):
    def resolved(_request):
        raise AssertionError("NeMo would be imported")

    monkeypatch.setattr(submit, "resolved", resolved)
    monkeypatch.setattr(render, "resolved", resolved)


@pytest.mark.parametrize(
    ("recipe", "says", "instead"),
    [
        ("llama3_8b_pretrain_b200_bf16", "a recipe for b200 does not fit h100", "next: llama3_8b_pretrain_h100_bf16"),
        ("llama3_8b_pretrain_b200_mxfp8", "h100 has no mxfp8", "next: recipes list llama3_8b pretrain h100"),
    ],
)
def test_a_recipe_for_another_gpu_is_refused_before_it_is_built(recipe, says, instead):
    for verb in (render.render, submit.submit):
        with pytest.raises(UserError, match=says) as refused:
            verb(name=recipe, cluster="dgx_h100")
        assert instead in str(refused.value)


def test_a_length_that_does_not_fit_is_refused_before_it_is_built_with_a_layout_that_does():
    for verb in (render.render, submit.submit):
        with pytest.raises(UserError, match="does not fit h100 so") as refused:
            verb(name="llama3_8b_pretrain_h100_bf16", cluster="dgx_h100", seq=131072)
        assert "--layout auto takes TP2 CP4 SP" in str(refused.value)
    with pytest.raises(AssertionError, match="NeMo would be imported"):
        render.render(name="llama3_8b_pretrain_h100_bf16", cluster="dgx_h100", seq=131072, layout="auto")


def test_a_folder_that_no_container_can_mount_is_refused_before_the_queue_sees_it():
    for verb in (render.render, submit.submit):
        with pytest.raises(UserError, match=r"contains ','(.|\n)*--runs"):
            verb(name="llama3_8b_pretrain_h100_bf16", cluster="dgx_h100", runs="/lustre/a,b:c d")


@pytest.mark.parametrize(
    ("recipe", "overrides"), [("llama3_8b_pretrain_h100_bf16", []), ("llama3_8b_pretrain_b200_bf16", ["with=fsdp"])]
)
def test_what_may_run_there_is_built(recipe, overrides):
    with pytest.raises(AssertionError, match="NeMo would be imported"):
        render.render(name=recipe, cluster="dgx_h100", overrides=overrides)


def test_a_controller_that_does_not_answer_is_told_before_the_recipe_is_built(monkeypatch):
    def ask(*_facts):
        raise UserError("Slurm's controller does not answer")

    monkeypatch.setattr(live_cluster, "query_cluster", ask)
    with pytest.raises(UserError, match="does not answer"):
        submit.submit(name="llama3_8b_pretrain_h100_bf16", cluster="dgx_h100")
