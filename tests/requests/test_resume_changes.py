"""Which overrides may change when a run is resumed, and the commands that use this table."""

import pytest

from superpod.errors import UserError
from superpod.requests import resume_changes
from superpod.runtime.runs.run_folder import RunFolder

NAME = "tiny_llama3"
LINES = ["trainer.max_steps = 120", "optim.config.lr = 0.001", "data.seq_length = 64", "model.config.num_layers = 4"]


@pytest.fixture
def trained(tmp_path):
    """A run with a checkpoint; a fine-tuning run if its facts say so."""

    def make(**facts):
        facts = {"overrides": ["trainer.max_steps=120"], **facts}
        run = RunFolder.create(tmp_path / "runs", NAME, facts=facts, recipe_lines=LINES)
        (run.checkpoints / "step=9-last").mkdir()
        return run

    return make


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.max_steps=49", "keeps its original schedule"),
        ("trainer.val_check_interval=5", ""),
        ("log.ckpt.every_n_train_steps=7", ""),
        ("log.log_dir=x", ""),
        ("trainer.callbacks[2].tp_comm_overlap=False", ""),
        ("trainer.devices=1", "the layout changes"),
        ("trainer.strategy.tensor_model_parallel_size=1", "the layout changes"),
        ("trainer.strategy.ddp.overlap_grad_reduce=False", ""),
        ("data.global_batch_size=16", "number of samples"),
        ("data.num_workers=0", ""),
        ("optim.config.clip_grad=0.5", ""),
        ("model.config.recompute_granularity=full", ""),
        ("model.config.hidden_dropout=0.1", ""),
        ("with=full_recompute", ""),
    ],
)
def test_allowed_changes_are_listed(override, says, trained):
    (change,) = resume_changes.find_changes(trained(), [override])
    path, _, value = override.partition("=")
    assert (change.path, change.new) == (path, value)
    assert says in change.note
    assert bool(says) == bool(change.note)


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("optim.config.lr=1e-5", "with the optimizer state"),
        ("optim.lr_scheduler.warmup_steps=5", "with the optimizer state"),
        ("optim.config.weight_decay=0", "with the optimizer state"),
        ("data.seq_length=128", "position in its data"),
        ("model.config.seq_length=128", "position in its data"),
        ("data.seed=5", "position in its data"),
        ("data.paths=[x]", "position in its data"),
        ("tokenizer=data", "position in its data"),
        ("model.config.num_layers=8", "contain its weights"),
        ("model.config.init_method_std=1", "contain its weights"),
        ("peft.dim=4", "contain its weights"),
        ("trainer.plugins.precision=16-mixed", "formats of its precision"),
        ("trainer.num_nodes=2", "keeps its size"),
        ("trainer.strategy.ckpt_optim_fully_reshardable=True", "saved in this format"),
        ("trainer.strategy.ddp.use_distributed_optimizer=False", "saved in this format"),
        ("resume.resume_from_path=/x", "its own latest checkpoint"),
        ("with=fp16", "contain its weights"),
    ],
)
def test_fields_restored_by_the_checkpoint_are_refused(override, why, trained):
    with pytest.raises(UserError, match="cannot be resumed with") as refused:
        resume_changes.find_changes(trained(), ["trainer.max_steps=130", override])
    assert why in str(refused.value)
    assert override.partition("=")[0] in str(refused.value)
    assert "max_steps" not in str(refused.value)


def test_steps_after_a_schedule_ending_at_0_are_refused(trained):
    """Measured: a fine-tuning run of 10 steps that was continued to 15 had a learning rate of 0.0 in steps 11 to 15."""
    run = trained()
    with (run.path / "recipe.txt").open("a") as lines:
        lines.write("optim.lr_scheduler.min_lr = 0.0\n")
    with pytest.raises(UserError, match="at step 120"):
        resume_changes.find_changes(run, ["trainer.max_steps=200"])
    assert resume_changes.find_changes(run, ["trainer.max_steps=100"])


def test_repeated_values_are_not_changes(trained):
    run = trained()
    assert (
        resume_changes.find_changes(run, ["trainer.max_steps=120", "optim.config.lr=1e-3", "data.seq_length=64"]) == []
    )


def test_changes_before_the_first_checkpoint_are_allowed(tmp_path):
    run = RunFolder.create(tmp_path / "runs", NAME, facts={}, recipe_lines=LINES)
    (change,) = resume_changes.find_changes(run, ["optim.config.lr=1e-5"])
    assert str(change) == "optim.config.lr: 0.001 -> 1e-5"
    with pytest.raises(UserError, match="keeps its size"):
        resume_changes.find_changes(run, ["trainer.num_nodes=2"])


def test_fine_tuning_keeps_its_batch_sizes(trained):
    run = trained(finetune={"model": "m", "data": ["d"]})
    with pytest.raises(UserError, match="packed into batches"):
        resume_changes.find_changes(run, ["data.global_batch_size=16"])
    with pytest.raises(UserError, match="val_check_interval"):
        resume_changes.find_changes(run, ["log.ckpt.every_n_train_steps=7"])


@pytest.mark.parametrize("verb", ["run", "finetune"])
def test_commands_refuse_before_nemo_is_imported(verb, trained, recipes_cli, tmp_path):
    facts = {"finetune": {"model": "m", "data": ["d"]}} if verb == "finetune" else {}
    run = trained(**facts)
    for checkpoint in run.checkpoints.iterdir():  # not whole by itself, and refused after the change is
        (checkpoint / "weights").mkdir()
    done = recipes_cli(verb, NAME, "--resume", run.path, "optim.config.lr=1e-5", cwd=tmp_path, timeout=20)
    assert done.returncode == 2, done.stderr
    assert "optim.config.lr" in done.stderr
    assert "cannot be resumed" in done.stderr
