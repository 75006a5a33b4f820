"""A fine-tuning recipe given what it is to do: the weights it starts from, its data, its steps. Needs NeMo."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import nemo_run as run

ALIGNED = 16
"""Sequences are padded to a multiple of this, which FP8 wants."""


@dataclass(frozen=True)
class Sizes:
    """How samples are laid into sequences for a recipe."""

    longest: int
    """Tokens of a sample at most: the recipe's sequence length."""
    size: int
    """Tokens of a packed sequence."""
    batch: int
    """Packed sequences of a step."""
    multiple: int
    """A sample takes a multiple of so many tokens: context parallelism cuts it."""
    aligned: int
    """And a sequence of so many: sequence parallelism cuts that."""


def sizes(partial: run.Partial, packed: bool) -> Sizes:
    """Packed, a micro-batch is one sequence as long as the recipe's micro-batch is in all, and memory as planned.

    Not packed, every sequence is one sample, as many in a step as the recipe has.
    """
    data, strategy = partial.data, partial.trainer.strategy
    fold = data.micro_batch_size if packed else 1
    cp = strategy.context_parallel_size or 1
    multiple = 2 * cp if cp > 1 else 1
    aligned = math.lcm(ALIGNED, multiple * (strategy.tensor_model_parallel_size or 1))
    return Sizes(data.seq_length, data.seq_length * fold, data.global_batch_size // fold, multiple, aligned)


def set_weights(partial: run.Partial, base: Path) -> None:
    """Start from the NeMo checkpoint `base`."""
    import nemo_run as run
    from nemo import lightning as nl

    partial.resume.restore_config = run.Config(nl.RestoreConfig, path=str(base))


def set_data(partial: run.Partial, folder: Path, made: Sizes, tokenizer: Path, validation: int) -> None:
    """Train on the packed files in `folder`, and look at all of its `validation` sequences each time."""
    import nemo_run as run
    from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
    from nemo.collections.llm.gpt.data.fine_tuning import FineTuningDataModule
    from nemo.collections.llm.gpt.data.packed_sequence import PackedSequenceSpecs

    partial.data = run.Config(
        FineTuningDataModule,
        dataset_root=str(folder),
        seq_length=made.size,
        micro_batch_size=1,  # of packed sequences, which attention reads one at a time
        global_batch_size=made.batch,
        num_workers=2,
        tokenizer=run.Config(AutoTokenizer, pretrained_model_name=str(tokenizer), use_fast=True),
        packed_sequence_specs=run.Config(
            PackedSequenceSpecs,
            packed_sequence_size=made.size,
            tokenizer_model_name="packed",
            packed_train_data_path=str(folder / TRAIN),
            packed_val_data_path=str(folder / VALIDATION),
            packed_metadata_path=str(folder / METADATA),
        ),
        dataset_kwargs={"pad_seq_length_to_mult": made.aligned},
    )
    partial.model.config.seq_length = made.size
    # Every learnt token counts alike, whatever sequence it is in. Context parallelism demands it: a rank may have none.
    partial.model.config.calculate_per_token_loss = True
    partial.trainer.strategy.ddp.average_in_collective = False
    partial.trainer.limit_val_batches = -(-validation // made.batch)
    partial.trainer.limit_test_batches = 0


TRAIN, VALIDATION, METADATA = "training.npy", "validation.npy", "packed.json"
"""Files of packed data."""


def set_steps(partial: run.Partial, steps: int | None) -> None:
    """Train for so many steps (None: the recipe's), validate at the last one too, and keep the best and the newest."""
    trainer, schedule = partial.trainer, partial.optim.lr_scheduler
    if steps:
        trainer.max_steps = steps
        schedule.warmup_steps = min(schedule.warmup_steps, steps // 10)
    most = min(trainer.val_check_interval, trainer.max_steps)
    trainer.val_check_interval = max(n for n in range(1, most + 1) if trainer.max_steps % n == 0)
    # Steps of the whole training: counted within what is left of the data, a resumed run would have too few for one.
    trainer.check_val_every_n_epoch = None
    saving: Any = partial.log.ckpt
    saving.monitor, saving.mode, saving.save_top_k = "val_loss", "min", 1
    saving.filename = "{step}-{val_loss:.4f}"
    saving.every_n_train_steps = None  # after each validation, when its loss is known
    saving.save_last = True  # a copy: a link to the best would lose what came after it
