"""`recipes submit --model`: errors before NeMo is imported and the cluster is queried."""

import dataclasses
import json

import pytest

from superpod.cli.cluster.submit import finetune_task
from superpod.cli.options.sample_options import TuningOptions
from superpod.requests.request import Request
from superpod.slurm.profiles import profiles
from tests.cli.conftest import SAMPLE
from tests.weights import tiny

SUBMIT = ["submit", "tiny_llama3_sft", "--cluster", "dgx_h100"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model", "m"], "--model requires --data"),
        (["--hf", "none", "--data", "d.jsonl"], "--model none is neither a folder"),
        (["--model", "empty", "--data", "d.jsonl"], "no config.json"),
        (["--model", "m", "--data", "bad.jsonl"], "bad.jsonl:2"),
        (["--model", "m", "--data", "d.jsonl:0.5", "--data", "bad.jsonl:0.5"], "bad.jsonl:2"),
        (["--model", "m", "--data", "d.jsonl:0.5", "--data", "bad.jsonl"], "bad.jsonl has no weight"),
        (["--model", "strange", "--data", "d.jsonl", "--no-forward-check"], "clip_qkv"),
        (["--data", "d.jsonl", "--data", "empty"], "--data is given 2 times"),
        (["--no-forward-check"], "--no-forward-check"),
        (
            ["--model", "m", "--data", "d.jsonl", "--sweep", "optim.config.lr=1e-4,1e-5"],
            "--sweep does not support --model",
        ),
        (["--model", "m", "--resume", "run"], "keeps its model and samples"),
        (["--learn", "last", "--resume", "run"], "keeps its model and samples"),
        (["--skip-bad-lines"], "--skip-bad-lines applies only to fine-tuning"),
        (["--no-pack"], "--no-pack applies only to fine-tuning"),
        (["--early-stopping", "3"], "--early-stopping applies only to fine-tuning"),
        (["--model", "m", "--data", "d.jsonl", "--validation-data", "bad.jsonl"], "bad.jsonl:2"),
        (["--model", "m", "--data", "d.jsonl", "--chat-template", "none.jinja"], "none.jinja"),
        (["--model", "m", "--data", "d.jsonl", "--learn", "all"], "all"),
        (["--model", "m", "--data", "d.jsonl", "--steps", "5", "trainer.max_steps=6"], "conflicts with"),
        (["--model", "m", "--data", "d.jsonl", "log.ckpt.monitor=x"], "its best and its latest checkpoint"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
@pytest.mark.slow
def test_user_errors_are_refused(words, says, refusal):
    assert says in refusal(*SUBMIT, *words)


def test_a_model_known_not_to_train_is_refused(refusal):
    words = ["submit", "gemma3_1b_pretrain_h100_bf16", "--cluster", "dgx_h100"]
    assert "cannot train: Megatron-Core 0.15" in refusal(*words)


def test_the_task_has_all_data_with_weights(tmp_path):
    for name in "ab":  # different samples, because duplicate sources are refused
        rows = [{"prompt": f"{name}{number}", "completion": "yes"} for number in range(40)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tiny.hollow(tmp_path / "m")
    data = [f"{tmp_path}/a:0.25", f"{tmp_path}/b:0.75"]
    profile = profiles.load("dgx_h100")
    samples = TuningOptions(data=data, no_forward_check=True)
    task = finetune_task(str(folder), samples, [Request("tiny_llama3_sft")], profile)
    assert task is not None
    assert (task.data, task.weights) == ((f"{tmp_path}/a", f"{tmp_path}/b"), (0.25, 0.75))
    assert not task.forward_check


def test_a_pretraining_recipe_is_refused(refusal):
    words = ["submit", "tiny_llama3", "--cluster", "dgx_h100", "--model", "m", "--data", "d.jsonl"]
    assert "tiny_llama3 is a pretraining recipe" in refusal(*words)


def test_finetune_and_submit_have_the_same_sample_options(tmp_path, recipes_cli):
    (tmp_path / "a").write_text(SAMPLE * 40)
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    folder = tiny.hollow(tmp_path / "m")
    shown = {verb: recipes_cli(verb, "--help", env={"COLUMNS": "200"}).stdout for verb in ("finetune", "submit")}
    for field in dataclasses.fields(TuningOptions):
        for verb, text in shown.items():
            assert f"--{field.name.replace('_', '-')}" in text, (verb, field.name)
    samples = TuningOptions(
        data=[f"{tmp_path}/a"],
        validation=0.25,
        key=["prompt=query"],
        skip_bad_lines=True,
        max_bad_share=1.0,
        chat_template=tmp_path / "t.jinja",
        learn="last",
        long="drop",
        pack=False,
        seed=7,
        steps=40,
        early_stopping=3,
        min_delta=0.1,
    )
    task = samples.task(str(folder))
    assert (task.share, task.seed, task.long, task.pack, task.learn) == (0.25, 7, "drop", False, "last")
    assert (task.steps, task.patience, task.min_delta, task.forward_check) == (40, 3, 0.1, True)
    assert (task.reading.keys, task.reading.skip, task.template) == (("prompt=query",), True, f"{tmp_path}/t.jinja")
