"""Requests planned without NeMo: the same script, and refusals where NeMo is needed."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from superpod.errors import UserError
from superpod.requests import deferred
from superpod.requests.request import Request
from superpod.slurm.profiles import profiles
from superpod.slurm.submission import connection, submit
from tests.requests import deferred_views

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
    [f"{path}=2" for path in deferred.NODE_ONLY_OVERRIDES if not path.startswith(("optim", "resume"))],
]
SAMPLE = [
    *(RECIPE, "llama3_70b_pretrain_h100_fp8cs", "mixtral_8x7b_pretrain_h100_bf16", "llama3_8b_lora_h100_bf16"),
    *("qwen3_30b_a3b_pretrain_b200_mxfp8", "deepseek_v3_pretrain_h100_bf16", "nemotronh_8b_pretrain_h100_bf16"),
    *("t5_220m_pretrain_a100_bf16", "hyena_1b_pretrain_a100_bf16", "tiny_llama3"),
]


def differences(folder: Path, cases) -> dict[str, list[str]]:
    (folder / "data" / "retrieval").mkdir(parents=True)  # NeMo has no mock data of this kind, and asks for the folder
    command = [sys.executable, "-W", "ignore", deferred_views.__file__, json.dumps(cases), folder / "differences.json"]
    environ = {**os.environ, "TORCH_EXTENSIONS_DIR": os.devnull}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, env=environ, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "differences.json").read_text())


@pytest.mark.nemo
@pytest.mark.slow
def test_planned_runs_equal_built_runs(tmp_path):
    """Every field, every word of the script, and every refusal; at ten sets of overrides."""
    cases = [[name, words] for name in SAMPLE for words in OVERRIDES]
    cases += [[one.recipe, [], one.facts()] for one in SIZES]
    assert {case: lines for case, lines in differences(tmp_path, cases).items() if lines} == {}


@pytest.mark.nemo
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_first_recipe_of_every_model_and_task(tmp_path):
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
def test_overrides_that_need_nemo_are_refused(override):
    with pytest.raises(UserError, match="can only be determined with NeMo") as refused:
        deferred.plan_run(Request(RECIPE, (override,)))
    assert "recipes render" in refused.value.hint
    assert "sbatch job.sbatch" in refused.value.hint


def test_recipe_of_a_user_collection_is_refused(tmp_path):
    own = tmp_path / "layouts" / "llama3_8b.toml"
    own.parent.mkdir()
    own.write_text('96k_pretrain_h100_bf16 = { 16 = "tp=8,cp=8,sp,gbs=64" }\n')
    code = (
        "from superpod.requests import deferred\nfrom superpod.requests.request import Request\n"
        "try: deferred.plan_run(Request('llama3_8b_96k_pretrain_h100_bf16'))\n"
        "except Exception as e: print(type(e).__name__, e)\n"
    )
    environ = {**os.environ, "SUPERPOD_RECIPES": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, timeout=60)
    assert "UserError" in done.stdout, done.stdout + done.stderr
    assert "your own collection" in done.stdout


def test_illegal_layout_is_refused():
    with pytest.raises(UserError, match="tp 3"):
        deferred.plan_run(Request(RECIPE, (f"{STRATEGY}tensor_model_parallel_size=3",)))


def test_script_contains_one_models_layouts():
    run = deferred.plan_run(Request(RECIPE))
    layouts = [name for name in deferred.sources(run) if "/layouts/" in name]
    assert layouts == ["superpod/included/recipes/layouts/llama3_8b.toml"]
    assert not any(
        name.startswith(("superpod/reports/", "superpod/weights/serving/")) for name in deferred.sources(run)
    )
    text = submit.script(submit.Submission(run, profiles.load("dgx_h100")))
    assert len(text) < 1_000_000  # Slurm's max_script_size is 4 MB
    assert text == submit.script(submit.Submission(run, profiles.load("dgx_h100")))


@pytest.mark.parametrize("override", ['log.name="\'\'\'\\"""', "optim.config.lr='''+__import__('os').system('x')+'''"])
def test_user_text_is_escaped_in_the_source(override, monkeypatch):
    monkeypatch.setattr(deferred, "NODE_ONLY_OVERRIDES", ("log.name", "optim.config.lr"))
    run = deferred.plan_run(Request(RECIPE, (override,)))
    literals = [node.value for node in ast.walk(ast.parse(run.source)) if isinstance(node, ast.Constant)]
    request = next(text for text in literals if isinstance(text, str) and text.startswith('{"recipe"'))
    assert json.loads(request)["overrides"] == [override]


SIZES = [Request(RECIPE, num_nodes=3), Request(RECIPE, seq=4096, batch_tokens=2**21), Request(RECIPE, gbs=256)]


@pytest.mark.parametrize("request_of_a_size", SIZES)
def test_source_contains_the_decided_layout(request_of_a_size):
    run = deferred.plan_run(request_of_a_size)
    literals = [node.value for node in ast.walk(ast.parse(run.source)) if isinstance(node, ast.Constant)]
    carried = json.loads(next(text for text in literals if isinstance(text, str) and text.startswith('{"recipe"')))
    second = deferred.plan_run(Request.from_facts(carried["recipe"], carried))
    assert deferred.plan_differences(deferred.planned_facts(run), deferred.planned_facts(second)) == []


def test_run_folder_has_script_plan_and_facts(tmp_path):
    submission = submit.Submission(deferred.plan_run(Request(RECIPE)), profiles.load("dgx_h100"), str(tmp_path))
    folder = Path(submit.new_run(submission, connection.Connection()))
    assert {"job.sbatch", "plan.json", "run.json", "recipe.txt"} <= {path.name for path in folder.iterdir()}
    facts = json.loads((folder / "run.json").read_text())
    assert (facts["nodes"], facts["gpus_per_node"], facts["max_steps"]) == (1, 8, submission.run.max_steps)
    assert "deferred.build(REQUEST, PLANNED)" in (folder / "job.sbatch").read_text()


def test_differences_on_the_node_are_reported():
    planned = deferred.planned_facts(deferred.plan_run(Request(RECIPE)))
    assert deferred.plan_differences(planned, planned) == []
    built = {**planned, "nodes": 2, "layout": {**planned["layout"], "tp": 8}}
    assert deferred.plan_differences(planned, built) == ["layout.tp: 2 planned, 8 built", "nodes: 1 planned, 2 built"]
