"""Configure NeMo's data modules and tokenizers from a data folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.data.folder import DataFolder

if TYPE_CHECKING:
    import nemo_run as run


def data_module(
    folder: DataFolder, *, seq_length: int, micro_batch_size: int, global_batch_size: int, num_workers: int = 2
) -> run.Config:
    """Return the configuration of NeMo's PreTrainingDataModule for a data folder.

    `seq_length` is in tokens, batch sizes are in samples. For validation, `limit_val_batches` must be an integer: NeMo
    rejects fractions for a single blend. Megatron writes its sample indices to `folder.index_cache_path`.
    """
    import nemo_run as run
    from nemo.collections.llm.gpt.data.pre_training import PreTrainingDataModule

    return run.Config(
        PreTrainingDataModule,
        paths=folder.blend,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
        num_workers=num_workers,
        split=folder.split,
        index_mapping_dir=str(folder.index_cache_path),
        tokenizer=tokenizer_config(folder),
    )


def mock_data_module(
    vocab_size: int,
    *,
    seq_length: int = 2048,
    micro_batch_size: int = 4,
    global_batch_size: int = 8,
    num_workers: int = 2,
) -> run.Config:
    """Return the configuration of NeMo's MockDataModule, which generates random token ids below `vocab_size`.

    `seq_length` is in tokens, batch sizes are in samples; their defaults are NeMo's. A tokenizer is set, because NeMo
    would otherwise download that of GPT-2. NullTokenizer adds an end-of-document token to its `vocab_size`.
    """
    import nemo_run as run
    from nemo.collections.common.tokenizers.null_tokenizer import NullTokenizer
    from nemo.collections.llm.gpt.data.mock import MockDataModule

    return run.Config(
        MockDataModule,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
        num_workers=num_workers,
        tokenizer=run.Config(NullTokenizer, vocab_size=vocab_size - 1),
    )


def tokenizer_config(folder: DataFolder) -> run.Config:
    """Return the configuration of the NeMo tokenizer that reads a data folder's tokenizer."""
    import nemo_run as run

    if folder.is_sentencepiece:
        from nemo.collections.common.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer

        return run.Config(SentencePieceTokenizer, model_path=folder.tokenizer_name)
    from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer

    return run.Config(AutoTokenizer, pretrained_model_name=folder.tokenizer_name, use_fast=True)
