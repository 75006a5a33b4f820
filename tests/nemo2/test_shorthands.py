"""Test shorthands for configurations, and early stopping."""

import pytest

from superpod.errors import UserError

pytestmark = [pytest.mark.nemo, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def partial():
    pytest.importorskip("nemo_run")
    from superpod.recipes import build

    return build("tiny_llama3_sft")


def test_wandb_project_adds_a_logger(partial):
    import fiddle as fdl

    from superpod.nemo2 import overrides

    overrides.apply(partial, ["log.wandb=one", "log.wandb=two"])
    logger = partial.log.wandb
    assert fdl.get_callable(logger).__name__ == "WandbLogger"
    assert (logger.project, logger.name) == ("two", "tiny_llama3_sft")
    assert partial.log.tensorboard is not None  # stays


def test_exported_file_has_the_logger_without_key(partial, monkeypatch):
    from superpod.nemo2 import overrides
    from superpod.nemo2.export import recipe_source

    monkeypatch.setenv("WANDB_API_KEY", "neverwrittenneverwritten")
    overrides.apply(partial, ["log.wandb=tests"])
    source = recipe_source.render(partial, "heading", [])
    assert "WandbLogger" in source
    assert "neverwritten" not in source
    compile(source, "recipe.py", "exec")


def test_starts_from_a_checkpoint(partial):
    import fiddle as fdl

    from superpod.nemo2 import overrides
    from superpod.recipes import build

    for recipe in (partial, build("tiny_llama3")):
        overrides.apply(recipe, ["resume.restore_config=/runs/r/step=9"])
        assert fdl.get_callable(recipe.resume.restore_config).__name__ == "RestoreConfig"
        assert recipe.resume.restore_config.path == "/runs/r/step=9"


def test_early_stopping_monitors_validation_loss(partial):
    from superpod.weights.finetuning import steps_and_checkpoints

    steps_and_checkpoints.set_steps(partial, 40)
    partial.trainer.val_check_interval = 10
    before = len(partial.trainer.callbacks)
    steps_and_checkpoints.set_early_stopping(partial, 0, 0.0)
    assert len(partial.trainer.callbacks) == before
    with pytest.raises(UserError, match="40 steps have only 4 validations, one every 10"):
        steps_and_checkpoints.set_early_stopping(partial, 4, 0.0)
    steps_and_checkpoints.set_early_stopping(partial, 3, 0.01)
    stopping = partial.trainer.callbacks[-1]
    assert (stopping.monitor, stopping.mode, stopping.patience, stopping.min_delta) == ("val_loss", "min", 3, 0.01)


def test_run_ended_by_early_stopping_is_done():
    import torch
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import EarlyStopping

    from superpod.runtime.rank import callback

    stopping = EarlyStopping("val_loss", patience=2, min_delta=0.1)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[stopping])

    for loss, ended in ((1.0, False), (0.95, False), (0.94, True)):
        stopping._evaluate_stopping_criteria(torch.tensor(loss))
        assert bool(callback.early_stop(trainer)) == ended
    assert (
        callback.early_stop(trainer)
        == "val_loss has not decreased by more than 0.1 in 2 validations; its best value is 1.0000"
    )
    assert callback.early_stop(Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)) == ""
