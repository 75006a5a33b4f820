"""The gate of the proof in `make test`: it executes, so that no edit of collection/facts/proven.json makes it pass.

A share of the recipes that rotates with the commit is built anew, what must be refused is refused, and a planted defect
turns one of these tests red.
"""

import pytest

from superpod.collection import recipe_job, registry
from superpod.planner import legality
from tests.rehearsal.proof.proof_stub import rotating

SMALL = "llama32_1b_pretrain_h100_bf16"
ODD = {"model.config.seq_length": 4104, "data.seq_length": 4104, "data.micro_batch_size": 1}
"""Tokens that are no multiple of 16, as FP8's matrix products need them; Transformer Engine's Python asks for 8."""
MUST_BE_REFUSED = {
    "FP8 with delayed scaling": {"recipe": "llama32_1b_pretrain_h100_fp8ds", "set": ODD},
    "FP8 with scales of blocks": {"recipe": "llama32_1b_pretrain_h100_fp8bw", "set": ODD},
    "MXFP8": {"recipe": "llama32_1b_pretrain_b200_mxfp8", "set": {"model.config.ffn_hidden_size": 8208}},
    "attention sinks over ring attention": {
        "recipe": "gpt_oss_20b_pretrain_b200_bf16",
        "set": {"trainer.strategy.context_parallel_size": 2, "model.config.cp_comm_type": "p2p"},
    },
    "padded packs on Ampere": {"recipe": "mixtral_8x7b_sft_a100_bf16", "packed": True},
    "hierarchical context parallelism": {
        "recipe": "llama3_8b_64k_pretrain_b300_bf16",
        "set": {"model.config.cp_comm_type": "a2a+p2p"},
    },
    "FP8 on Ampere": {"recipe": "llama32_1b_pretrain_h100_fp8ds", "generation": "sm80"},
}
"""Configurations that no GPU of their generation takes."""
DEFECTS = {
    "a GEMM takes any FP8 shape": "FP8 with scales of blocks",
    "every attention has a fused kernel": "padded packs on Ampere",
}
"""Planted defect -> the configuration that then builds, which turns the test of it red."""


def test_every_layout_is_legal():
    """Of every model, task, sequence and size; of the precisions that share a layout the first."""
    jobs = {}
    for recipe in registry.recipes().values():
        for nodes in recipe.nodes:
            key = (recipe.model.name, recipe.task, recipe.seq, recipe.gpus_per_node, nodes, recipe.layout(nodes))
            jobs.setdefault(key, (recipe, nodes))
    illegal = {}
    for recipe, nodes in jobs.values():
        if broken := legality.violations(recipe_job.job(recipe, nodes)):
            illegal[recipe.name, nodes] = broken[0].message
    assert illegal == {}


@pytest.mark.nemo
@pytest.mark.slow
def test_a_share_that_rotates_with_the_commit_is_built(with_te):
    proven = with_te(prove={"names": [recipe.name for recipe in rotating(2, encoders=False, changed=2)]})
    assert proven["failures"] == []
    assert proven["differences"] == [], "recipes prove --write NAMES builds what has changed; with --most 0 nothing"
    assert proven["built"] == proven["different"] >= 2, "a constructor measures the number of GPUs: one build for each"


@pytest.mark.nemo
@pytest.mark.parametrize("what", MUST_BE_REFUSED)
def test_what_no_gpu_takes_is_refused(with_te, what):
    assert "refused" in with_te(**MUST_BE_REFUSED[what])


@pytest.mark.nemo
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_of_a_stand_in_turns_the_gate_red(with_te, defect):
    question = MUST_BE_REFUSED[DEFECTS[defect]]
    assert "refused" not in with_te(**question, defect=defect)


UNSEEN = {
    "experts dispatch over no group": ("mixtral_8x7b_64k_pretrain_a100_bf16", {}, "dispatcher's ep_group has 1 ranks"),
    "split layers have no group": (
        "mixtral_8x7b_pretrain_h100_fp8bw",
        {},
        "is split over 4 ranks and has a group of 1",
    ),
    "nothing is gathered or scattered": ("mixtral_8x7b_pretrain_h100_fp8bw", {}, "sequence parallelism of 4"),
    "stages exchange nothing": ("mixtral_8x7b_pretrain_h100_fp8bw", {}, "pipeline parallelism of 2"),
    None: ("llama3_8b_64k_pretrain_b300_bf16", {"model.config.cp_comm_type": "a2a+p2p"}, "context parallelism of 2"),
}
"""Defect -> recipe, fields, and the refusal: each parallel size must be visible in what was communicated."""


@pytest.mark.nemo
@pytest.mark.parametrize("defect", UNSEEN)
def test_item_9_a_parallel_size_that_nothing_communicates_over_is_refused(with_te, defect):
    recipe, fields, refusal = UNSEEN[defect]
    if defect:
        assert "refused" not in with_te(recipe=recipe)
    refused = with_te(recipe=recipe, set=fields, defect=defect)["refused"]
    assert refused.startswith("NotParallelError")
    assert refusal in refused


@pytest.mark.nemo
@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"trainer.strategy.microbatch_group_size_per_vp_stage": 2}, "should range in [PP=4 , M="),
        ({"trainer.strategy.microbatch_group_size_per_vp_stage": 512}, "should range in [PP=4 , M="),
        ({"trainer.strategy.microbatch_group_size_per_vp_stage": 5}, "introduces dependency bubbles"),
        ({"data.global_batch_size": 20}, "introduces dependency bubbles"),
        ({"data.global_batch_size": 33}, "not divisible"),
        ({"trainer.strategy.microbatch_group_size_per_vp_stage": 12}, None),
    ],
)
def test_item_10_what_megatrons_schedule_refuses_at_step_1_is_refused(with_te, fields, refusal):
    """By the real schedule, of a recipe with PP 4 and 5 chunks on each stage."""
    refused = with_te(recipe="llama3_70b_pretrain_a100_bf16", nodes=8, set=fields).get("refused", "")
    assert refusal in refused if refusal else refused == ""


@pytest.mark.nemo
def test_item_10_fewer_micro_batches_end_as_all_of_them_do(with_te):
    compared = with_te(schedules=40)
    assert compared["differing"] == []
    assert len(compared["ends"]) >= 4, "one schedule of each kind, and each refusal"


@pytest.mark.nemo
@pytest.mark.parametrize("defect", [None, "the planner refuses nothing"])
def test_a_planted_layout_turns_the_gate_red(with_te, defect):
    """By the planner's rules; and without them by Megatron's own."""
    illegal = {"names": [SMALL], "layout": {"tp": 3, "sp": True}}
    (failure,) = with_te(prove=illegal, defect=defect)["failures"]
    assert ("illegal" in failure[2]) == (defect is None), failure
