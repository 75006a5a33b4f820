"""Set up a fine-tuning recipe: the weights it starts from, its data, its steps. Needs NeMo.

A comment on a line that sets a value is also the comment on that value in an exported file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.errors import UserError
from superpod.nemo2.validation.configured_job import records_graphs

if TYPE_CHECKING:
    import nemo_run as run

ALIGNED = 16
"""Sequences are padded to a multiple of this many tokens, because FP8 matrix products need it."""


@dataclass(frozen=True)
class Sizes:
    """How samples are packed into sequences for a recipe; all but `batch` in tokens."""

    longest: int
    """The most that a sample may have: the recipe's sequence length."""
    size: int
    """The length of a packed sequence."""
    batch: int
    """Packed sequences per step."""
    multiple: int
    """A sample is padded to a multiple of this: context parallelism cuts it into 2 x cp pieces."""
    aligned: int
    """A sequence is padded to a multiple of this: sequence parallelism cuts each piece by tp."""


def sizes(partial: run.Partial, packed: bool) -> Sizes:
    """Packed, a micro-batch is one sequence with as many tokens as the recipe's micro-batch: memory is as planned.

    Not packed, every sequence is one sample, and a step has as many as the recipe's global batch.
    """
    data, strategy = partial.data, partial.trainer.strategy
    fold = data.micro_batch_size if packed else 1
    cp = strategy.context_parallel_size or 1
    multiple = 2 * cp if cp > 1 else 1  # each rank takes a piece from the front and one from the back, of equal work
    aligned = math.lcm(ALIGNED, multiple * (strategy.tensor_model_parallel_size or 1))
    return Sizes(data.seq_length, data.seq_length * fold, data.global_batch_size // fold, multiple, aligned)


def set_weights(partial: run.Partial, base: Path) -> None:
    """Start from the NeMo checkpoint `base`."""
    import nemo_run as run
    from nemo import lightning as nl

    partial.resume.restore_config = run.Config(nl.RestoreConfig, path=str(base))


def set_data(
    partial: run.Partial, folder: Path, sizes: Sizes, tokenizer: Path, validation: int, *, packed: bool = True
) -> None:
    """Train on the packed files in `folder`; every validation reads all of its `validation` sequences.

    `packed`: whether a sequence holds several samples, so that it is nearly full.
    """
    import nemo_run as run
    from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
    from nemo.collections.llm.gpt.data.fine_tuning import FineTuningDataModule
    from nemo.collections.llm.gpt.data.packed_sequence import PackedSequenceSpecs

    partial.data = run.Config(
        FineTuningDataModule,
        dataset_root=str(folder),
        seq_length=sizes.size,
        micro_batch_size=1,  # of packed sequences, which attention reads one at a time
        global_batch_size=sizes.batch,
        num_workers=2,
        tokenizer=run.Config(AutoTokenizer, pretrained_model_name=str(tokenizer), use_fast=True),
        packed_sequence_specs=run.Config(
            PackedSequenceSpecs,
            packed_sequence_size=sizes.size,
            tokenizer_model_name="packed",
            packed_train_data_path=str(folder / TRAIN),
            packed_val_data_path=str(folder / VALIDATION),
            packed_metadata_path=str(folder / METADATA),
        ),
        dataset_kwargs={"pad_seq_length_to_mult": sizes.aligned},
    )
    _fix_length(partial, packed)
    partial.model.config.seq_length = sizes.size
    # Every learnt token counts alike, whatever sequence it is in. Context parallelism demands it: a rank may have none.
    partial.model.config.calculate_per_token_loss = True
    partial.trainer.strategy.ddp.average_in_collective = False
    partial.trainer.limit_val_batches = -(-validation // sizes.batch)
    partial.trainer.limit_test_batches = 0


def _fix_length(partial: run.Partial, packed: bool) -> None:
    """Make every batch as long as the model's `seq_length` where something was made for that length only.

    Userbuffers are (NeMo 2.7.3 megatron_comm_overlap.py, _init_te_userbuffers), and CUDA graphs, for which the number
    of samples in a sequence must not change either. Sequences of one sample would be mostly padding: they go without.
    """
    overlapped = [c for c in partial.trainer.callbacks if getattr(c, "tp_comm_overlap", False)]
    if overlapped and not packed:
        for callback in overlapped:
            callback.tp_comm_overlap = False  # userbuffers have one length, and these samples have many
        return
    graphs = records_graphs(partial.model.config)
    if overlapped or graphs:
        # NeMo's packed recipes do the same.
        partial.data.dataset_kwargs = {**partial.data.dataset_kwargs, "pad_to_max_length": True}
    if graphs:
        partial.data.packed_sequence_specs.pad_cu_seqlens = True


TRAIN, VALIDATION, METADATA = "training.npy", "validation.npy", "packed.json"
"""Files of packed data."""


def set_early_stopping(partial: run.Partial, patience: int, min_delta: float) -> None:
    """End the training after `patience` validations without a loss lower by more than `min_delta` nats; 0 = never.

    Call it when steps and their validations are set.

    Raises:
        UserError: the run has no more validations than that.
    """
    if not patience:
        return
    import nemo_run as run
    from lightning.pytorch.callbacks import EarlyStopping

    trainer = partial.trainer
    validations = trainer.max_steps // trainer.val_check_interval
    if validations <= patience:
        raise UserError(
            f"--early-stopping {patience}: {trainer.max_steps} steps have {validations} validations, one every "
            f"{trainer.val_check_interval}, so that it could never stop the run early",
            f"a smaller trainer.val_check_interval, such as {max(1, trainer.max_steps // (4 * patience))}",
        )
    # Every rank has the loss (NeMo 2.7.3 megatron_strategy.py, validation_step), and any one stops all.
    stopping = run.Config(EarlyStopping, monitor="val_loss", mode="min", patience=patience, min_delta=min_delta)
    trainer.callbacks = [*trainer.callbacks, stopping]


def set_steps(partial: run.Partial, steps: int | None) -> None:
    """Train for `steps` (None: the recipe's), validate at the last one too, keep the best and the newest checkpoint."""
    trainer = partial.trainer
    trainer.max_steps = steps or trainer.max_steps
    # The largest interval that divides the steps, so that the last step is validated.
    most = min(trainer.val_check_interval, trainer.max_steps)
    trainer.val_check_interval = max(n for n in range(1, most + 1) if trainer.max_steps % n == 0)
    # Steps of the whole training: counted within what is left of the data, a resumed run would have too few for one.
    trainer.check_val_every_n_epoch = None
    saving = partial.log.ckpt
    saving.monitor, saving.mode, saving.save_top_k = "val_loss", "min", 1
    saving.filename = "{step}-{val_loss:.4f}"
    saving.every_n_train_steps = None  # after each validation, when its loss is known
    saving.save_last = True  # a copy: a link to the best would lose what came after it
