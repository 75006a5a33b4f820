"""Sets the number of steps, validation interval and saved checkpoints of a fine-tuning recipe. Needs NeMo.

The comment at the end of a line that sets a value becomes the comment on that value in an exported file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.errors import UserError

if TYPE_CHECKING:
    import nemo_run as run


def set_early_stopping(partial: run.Partial, patience: int, min_delta: float) -> None:
    """Add early stopping after `patience` validations whose loss does not decrease by more than `min_delta` nats.

    Call this after `set_steps`. A patience of 0 disables early stopping.

    Raises:
        UserError: the run has `patience` validations or fewer.
    """
    if not patience:
        return
    import nemo_run as run
    from lightning.pytorch.callbacks import EarlyStopping

    trainer = partial.trainer
    validations = trainer.max_steps // trainer.val_check_interval
    if validations <= patience:
        raise UserError(
            f"--early-stopping {patience} cannot stop this run early: {trainer.max_steps} steps have only "
            f"{validations} validations, one every {trainer.val_check_interval} steps",
            f"set a smaller trainer.val_check_interval, such as {max(1, trainer.max_steps // (4 * patience))}",
        )
    # Every rank knows the loss (NeMo 2.7.3 megatron_strategy.py, validation_step), and any rank stops all.
    stopping = run.Config(EarlyStopping, monitor="val_loss", mode="min", patience=patience, min_delta=min_delta)
    trainer.callbacks = [*trainer.callbacks, stopping]


def set_steps(partial: run.Partial, steps: int | None) -> None:
    """Set the number of steps, validate at the last step, and keep the best and the newest checkpoint.

    If `steps` is None, the recipe's number of steps is kept.
    """
    trainer = partial.trainer
    trainer.max_steps = steps or trainer.max_steps
    # Use the largest interval that divides the number of steps, so that the last step is validated.
    max_interval = min(trainer.val_check_interval, trainer.max_steps)
    trainer.val_check_interval = max(n for n in range(1, max_interval + 1) if trainer.max_steps % n == 0)
    # Count steps over all epochs: per epoch, a resumed run may have too few steps left for a validation.
    trainer.check_val_every_n_epoch = None
    saving = partial.log.ckpt
    saving.monitor, saving.mode, saving.save_top_k = "val_loss", "min", 1
    saving.filename = "{step}-{val_loss:.4f}"
    saving.every_n_train_steps = None  # after each validation, when its loss is known
    saving.save_last = True  # a copy, because a link to the best checkpoint would not contain later steps
