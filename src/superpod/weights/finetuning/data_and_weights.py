"""Sets the initial checkpoint and the data of a fine-tuning recipe. Needs NeMo.

The comment at the end of a line that sets a value becomes the comment on that value in an exported file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.nemo2.validation.configured_job import records_graphs

if TYPE_CHECKING:
    import nemo_run as run

SEQUENCE_MULTIPLE = 16
"""Sequences are padded to a multiple of this many tokens, which FP8 GEMMs require."""


@dataclass(frozen=True)
class PackingSizes:
    """Sizes for packing samples into sequences, in tokens except `batch`."""

    longest: int
    """Maximum length of a sample: the recipe's sequence length."""
    size: int
    """Length of a packed sequence."""
    batch: int
    """Packed sequences per step."""
    multiple: int
    """Samples are padded to a multiple of this: context parallelism splits them into 2 x cp chunks."""
    aligned: int
    """Sequences are padded to a multiple of this: sequence parallelism splits each chunk into tp parts."""


def compute_sizes(partial: run.Partial, packed: bool) -> PackingSizes:
    """Return the sizes for packing the samples of a fine-tuning recipe.

    With `packed`, a micro-batch is one sequence with the tokens of the recipe's micro-batch, so that memory is as
    planned. Otherwise, a sequence is one sample, and a step has as many samples as the recipe's global batch.
    """
    data, strategy = partial.data, partial.trainer.strategy
    fold = data.micro_batch_size if packed else 1
    cp = strategy.context_parallel_size or 1
    multiple = 2 * cp if cp > 1 else 1  # each rank takes an early and a late chunk, to balance the FLOPs of attention
    aligned = math.lcm(SEQUENCE_MULTIPLE, multiple * (strategy.tensor_model_parallel_size or 1))
    return PackingSizes(data.seq_length, data.seq_length * fold, data.global_batch_size // fold, multiple, aligned)


def set_initial_weights(partial: run.Partial, base: Path) -> None:
    """Set the NeMo checkpoint `base` as the initial weights of a recipe."""
    import nemo_run as run
    from nemo import lightning as nl

    partial.resume.restore_config = run.Config(nl.RestoreConfig, path=str(base))


def set_data(
    partial: run.Partial, folder: Path, sizes: PackingSizes, tokenizer: Path, validation: int, *, packed: bool = True
) -> None:
    """Set the packed files in a folder as the training and validation data of a recipe.

    Args:
        partial: the recipe, which is modified.
        folder: folder with the files that `packed_data.pack` wrote.
        sizes: sizes with which they were packed.
        tokenizer: folder of the tokenizer.
        validation: number of validation sequences; each validation reads all of them.
        packed: whether a sequence contains several samples.
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
    _pad_to_fixed_length(partial, packed)
    partial.model.config.seq_length = sizes.size
    # Weight every token equally, regardless of its sequence. Context parallelism requires this, because a rank may have
    # no token that is trained on.
    partial.model.config.calculate_per_token_loss = True
    partial.trainer.strategy.ddp.average_in_collective = False
    partial.trainer.limit_val_batches = -(-validation // sizes.batch)
    partial.trainer.limit_test_batches = 0


def _pad_to_fixed_length(partial: run.Partial, packed: bool) -> None:
    """Pad every batch to the model's `seq_length` if userbuffers or CUDA graphs require a fixed length.

    Userbuffers have a fixed length (NeMo 2.7.3 megatron_comm_overlap.py, _init_te_userbuffers). CUDA graphs also need a
    fixed number of samples per sequence. Without packing, padded sequences would be mostly padding, so userbuffers are
    disabled instead.
    """
    overlap_callbacks = [c for c in partial.trainer.callbacks if getattr(c, "tp_comm_overlap", False)]
    if overlap_callbacks and not packed:
        for callback in overlap_callbacks:
            callback.tp_comm_overlap = False  # userbuffers have a fixed length, but these samples have many lengths
        return
    graphs = records_graphs(partial.model.config)
    if overlap_callbacks or graphs:
        # NeMo's packed recipes do the same.
        partial.data.dataset_kwargs = {**partial.data.dataset_kwargs, "pad_to_max_length": True}
    if graphs:
        partial.data.packed_sequence_specs.pad_cu_seqlens = True


TRAIN, VALIDATION, METADATA = "training.npy", "validation.npy", "packed.json"
"""Names of the files with packed data."""
