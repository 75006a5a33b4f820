"""The examples of pruning and distillation run on CPUs as their pages say, and transformers loads what they write."""

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

EXAMPLE = ROOT / "examples" / "compress"
TEACHER = (
    "import sys; from pathlib import Path; from tests.weights import tiny; "
    "tiny.folder(Path(sys.argv[1]), 'llama', **tiny.RECIPE, initializer_range=0.08)"
)
NARROW = {"layers": 3, "ffn_hidden_size": 256, "hidden_size": 128, "attention_heads": 4, "query_groups": 2}
HEAD, ROWS = 32, 320
ONE_RANK = ["trainer.devices=1", "trainer.strategy.tensor_model_parallel_size=1"]
ONE_RANK += ["trainer.strategy.sequence_parallel=False"]
SHORT = ["trainer.max_steps=20", "trainer.val_check_interval=20", "trainer.limit_val_batches=1"]
SHORT += ["trainer.log_every_n_steps=1", "optim.config.lr=5e-3", "optim.lr_scheduler.warmup_steps=2"]
SHORT += ["data.seq_length=64", "data.micro_batch_size=8", "data.global_batch_size=32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, recipes_cli):
    """The Hugging Face folders of a teacher, of it with layers dropped, made narrow, and distilled after that."""
    folder = tmp_path_factory.mktemp("compress")

    def start(*words):
        environment = {**os.environ, "NEMORUN_HOME": str(folder / "nemo_run"), "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-W", "ignore", *map(str, words)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + done.stderr

    def convert(source, out):
        done = recipes_cli("ckpt", "convert", str(source), out, cwd=folder, timeout=1500)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    start("-c", TEACHER, "teacher-hf")
    convert("teacher-hf", "teacher")
    none = [f"pruning_config.target_num_layers={None}", "data=None"]
    start(EXAMPLE / "prune.py", "teacher", "dropped", "pruning_config.drop_layers=[2,3]", *none)
    sizes = [f"pruning_config.target_{name}={size}" for name, size in prefixed(NARROW).items()]
    start(EXAMPLE / "prune.py", "teacher", "narrow", *sizes, "num_train_samples=8", "data.seq_length=64")
    output = start(EXAMPLE / "distill.py", "narrow", "teacher", "logs", *ONE_RANK, *SHORT)
    (folder / "distill.txt").write_text(output)
    (saved,) = (weights.parent for weights in folder.glob("logs/**/*-last/weights"))
    convert("dropped", "dropped-hf")
    convert("narrow", "narrow-hf")
    convert(saved, "distilled-hf")
    return folder


def prefixed(sizes):
    """By NeMo's names."""
    return {name if name.endswith("size") else f"num_{name}": size for name, size in sizes.items()}


def model(folder):
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()


def divergence(student, teacher):
    """KL(teacher, student) in nats a token, on tokens that none of them has seen."""
    import torch
    import torch.nn.functional as F

    tokens = torch.randint(ROWS, (8, 64), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        ours, theirs = (F.log_softmax(model(tokens).logits, -1) for model in (student, teacher))
    return F.kl_div(ours, theirs, log_target=True, reduction="none").sum(-1).mean().item()


@pytest.mark.nemo
@pytest.mark.long
def test_dropped_layers_are_gone_and_the_others_are_the_teachers(folder):
    import torch

    teacher, dropped = (model(folder / f"{name}-hf").model for name in ("teacher", "dropped"))
    assert len(dropped.layers) == 2
    for ours, theirs in zip(dropped.layers, (teacher.layers[0], teacher.layers[3]), strict=True):
        for name, value in ours.state_dict().items():
            assert torch.equal(value, theirs.state_dict()[name]), name


@pytest.mark.nemo
@pytest.mark.long
def test_a_narrowed_model_has_the_parameters_that_its_sizes_say(folder):
    import torch

    narrow = model(folder / "narrow-hf")
    layers, ffn, hidden, heads, groups = NARROW.values()
    layer = 2 * hidden * HEAD * (heads + groups) + 3 * hidden * ffn + 2 * hidden
    assert sum(tensor.numel() for tensor in narrow.parameters()) == layers * layer + 2 * ROWS * hidden + hidden
    answer = narrow.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert len(answer[0]) == 8


@pytest.mark.nemo
@pytest.mark.long
def test_twenty_steps_bring_the_student_nearer_to_its_teacher(folder):
    losses = [float(loss) for loss in re.findall(r"reduced_train_loss: ([\d.]+)", (folder / "distill.txt").read_text())]
    assert len(losses) >= 20
    assert losses[-1] < 0.8 * losses[0]
    teacher, before, after = (model(folder / f"{name}-hf") for name in ("teacher", "narrow", "distilled"))
    assert divergence(after, teacher) < 0.9 * divergence(before, teacher)
    assert divergence(teacher, teacher) < 1e-6
