"""Without NeMo a request is planned: the same script, and what only NeMo can tell is refused."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from superpod.errors import UserError
from superpod.lifecycle import on_node, planned_run
from superpod.lifecycle.request import Request
from superpod.slurm import connection, profiles, submit
from tests.lifecycle import planned_views

RECIPE = "llama3_8b_pretrain_h100_bf16"
STRATEGY = "trainer.strategy."
OVERRIDES = [
    [],
    ["trainer.max_steps=7", "optim.config.lr=2e-3", "log.ckpt.every_n_train_steps=3"],
    [f"{STRATEGY}tensor_model_parallel_size=2", f"{STRATEGY}sequence_parallel=True"],
    [f"{STRATEGY}tensor_model_parallel_size=1", f"{STRATEGY}sequence_parallel=False"],
    [f"{STRATEGY}pipeline_model_parallel_size=2", f"{STRATEGY}virtual_pipeline_model_parallel_size=None"],
    [f"{STRATEGY}context_parallel_size=2", "data.global_batch_size=1024", "data.micro_batch_size=1"],
    ["data.seq_length=4096", "model.config.seq_length=4096"],
    ["data.seq_length=4096"],
    ["trainer.num_nodes=16"],
    ["trainer.devices=4"],
    ["optim.config.weight_decay=0.2", "optim.config.clip_grad=0.5", "optim.config.adam_beta1=0.8"],
    ["optim.config.adam_beta2=0.9", "optim.config.adam_eps=1e-7", "optim.lr_scheduler.constant_steps=2"],
    ["optim.lr_scheduler.warmup_steps=3", "optim.lr_scheduler.min_lr=1e-7", "optim.config.min_lr=1e-7"],
    [f"{path}=2" for path in planned_run.NOT_PLANNED if not path.startswith(("optim", "resume"))],
]
SAMPLE = [
    *(RECIPE, "llama3_70b_pretrain_h100_fp8cs", "mixtral_8x7b_pretrain_h100_bf16", "llama3_8b_lora_h100_bf16"),
    *("qwen3_30b_a3b_pretrain_b200_mxfp8", "deepseek_v3_pretrain_h100_bf16", "nemotronh_8b_pretrain_h100_bf16"),
    *("t5_220m_pretrain_a100_bf16", "hyena_1b_pretrain_a100_bf16", "tiny_llama3"),
]


def differences(folder: Path, cases) -> dict[str, list[str]]:
    (folder / "data" / "retrieval").mkdir(parents=True)  # NeMo has no mock data of this kind, and asks for the folder
    command = [sys.executable, "-W", "ignore", planned_views.__file__, json.dumps(cases), folder / "differences.json"]
    environ = {**os.environ, "TORCH_EXTENSIONS_DIR": os.devnull}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, env=environ, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "differences.json").read_text())


@pytest.mark.nemo
@pytest.mark.slow
def test_planned_runs_are_what_nemo_builds(tmp_path):
    """Every field, every word of the script, and every refusal; at ten sets of overrides."""
    cases = [[name, words] for name in SAMPLE for words in OVERRIDES]
    cases += [[one.recipe, [], one.facts()] for one in SIZES]
    assert {case: lines for case, lines in differences(tmp_path, cases).items() if lines} == {}


@pytest.mark.nemo
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_first_recipe_of_every_model_and_task(tmp_path):
    answers = differences(tmp_path, "models")
    assert len(answers) > 250
    assert {case: lines for case, lines in answers.items() if lines} == {}


@pytest.mark.parametrize(
    "override",
    [
        "with=fsdp",
        "model.config.num_layers=2",
        "trainer.max_steps*=2",
        "trainer.max_steps=1e2",
        "trainer.callbacks=[]",
        "optim.config.lr*=2",
        "optim.config.use_distributed_optimizer=False",
        f"{STRATEGY}ckpt_async_save=False",
    ],
)
def test_what_only_nemo_can_tell_is_refused_with_the_way_out(override):
    with pytest.raises(UserError, match="only NeMo can say") as refused:
        planned_run.resolve(Request(RECIPE, (override,)))
    assert "recipes render" in refused.value.hint
    assert "sbatch job.sbatch" in refused.value.hint


def test_a_recipe_of_a_users_own_is_refused(tmp_path):
    own = tmp_path / "layouts" / "llama3_8b.toml"
    own.parent.mkdir()
    own.write_text(
        '[[layouts]]\nrecipes = ["96k_pretrain_h100_bf16"]\nnodes.16 = { tp = 8, sp = true, cp = 8, gbs = 64 }\n'
    )
    code = (
        "from superpod.lifecycle import planned_run\nfrom superpod.lifecycle.request import Request\n"
        "try: planned_run.resolve(Request('llama3_8b_96k_pretrain_h100_bf16'))\n"
        "except Exception as e: print(type(e).__name__, e)\n"
    )
    environ = {**os.environ, "SUPERPOD_RECIPES": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, timeout=60)
    assert "UserError" in done.stdout, done.stdout + done.stderr
    assert "folder of your own" in done.stdout


def test_an_illegal_layout_is_refused_as_ever():
    with pytest.raises(UserError, match="tp 3"):
        planned_run.resolve(Request(RECIPE, (f"{STRATEGY}tensor_model_parallel_size=3",)))


def test_the_script_carries_one_models_layouts_and_stays_small():
    run = planned_run.resolve(Request(RECIPE))
    layouts = [name for name in planned_run.sources(run) if "/layouts/" in name]
    assert layouts == ["superpod/recipes/layouts/llama3_8b.toml"]
    text = submit.script(submit.Submission(run, profiles.load("dgx_h100")))
    assert len(text) < 1_000_000  # Slurm's max_script_size is 4 MB
    assert text == submit.script(submit.Submission(run, profiles.load("dgx_h100")))


@pytest.mark.parametrize("override", ['log.name="\'\'\'\\"""', "optim.config.lr='''+__import__('os').system('x')+'''"])
def test_no_text_of_the_user_leaves_its_place_in_the_carried_file(override, monkeypatch):
    monkeypatch.setattr(planned_run, "NOT_PLANNED", ("log.name", "optim.config.lr"))
    run = planned_run.resolve(Request(RECIPE, (override,)))
    literals = [node.value for node in ast.walk(ast.parse(run.source)) if isinstance(node, ast.Constant)]
    request = next(text for text in literals if isinstance(text, str) and text.startswith('{"recipe"'))
    assert json.loads(request)["overrides"] == [override]


SIZES = [Request(RECIPE, num_nodes=3), Request(RECIPE, seq=4096, batch_tokens=2**21), Request(RECIPE, gbs=256)]


@pytest.mark.parametrize("request_of_a_size", SIZES)
def test_the_node_gets_the_size_that_was_decided_and_searches_for_none(request_of_a_size):
    run = planned_run.resolve(request_of_a_size)
    literals = [node.value for node in ast.walk(ast.parse(run.source)) if isinstance(node, ast.Constant)]
    carried = json.loads(next(text for text in literals if isinstance(text, str) and text.startswith('{"recipe"')))
    second = planned_run.resolve(Request.of_facts(carried["recipe"], carried))
    assert on_node.unlike(planned_run.what_was_planned(run), planned_run.what_was_planned(second)) == []


def test_a_run_folder_has_its_script_its_plan_and_its_facts(tmp_path):
    submission = submit.Submission(planned_run.resolve(Request(RECIPE)), profiles.load("dgx_h100"), str(tmp_path))
    folder = Path(submit.new_run(submission, connection.Connection()))
    assert {"job.sbatch", "plan.json", "run.json", "recipe.txt"} <= {path.name for path in folder.iterdir()}
    facts = json.loads((folder / "run.json").read_text())
    assert (facts["nodes"], facts["gpus_per_node"], facts["max_steps"]) == (1, 8, submission.run.max_steps)
    assert "on_node.build(REQUEST, PLANNED)" in (folder / "job.sbatch").read_text()


def test_what_differs_on_the_node_is_named_with_both_values():
    planned = planned_run.what_was_planned(planned_run.resolve(Request(RECIPE)))
    assert on_node.unlike(planned, planned) == []
    built = {**planned, "nodes": 2, "layout": {**planned["layout"], "tp": 8}}
    assert on_node.unlike(planned, built) == ["layout.tp: 2 planned, 8 built", "nodes: 1 planned, 2 built"]
