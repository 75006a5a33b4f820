"""T5, BERT, and models for sentence embeddings. Learning rates and steps are those of NeMo 2.7.3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from superpod.collection.registry import model, nemo

if TYPE_CHECKING:
    import nemo_run as run

NEEDS_TE = "NeMo can build its layers only with Transformer Engine"
T5 = {"seq": 512, "lr": 1e-4, "min_lr": 1e-5, "warmup_steps": 10_000, "max_steps": 1_000_000, "unproven": NEEDS_TE}
BERT = T5 | {"warmup_steps": 500, "max_steps": 1_168_251}
MOCK_SAMPLES = 10_000_000
"""Number of mock samples, as for GPT in NeMo; its 10,000 for T5 and BERT last less than a validation interval."""
EMBED = {"seq": 512, "lr": 1e-4, "min_lr": 1e-5, "warmup_steps": 500, "max_steps": 1_168_251}


def _use_t5_data(partial: run.Partial) -> None:
    """Set the data of a recipe to mock data for an encoder-decoder model."""
    _set_data(partial, "T5MockDataModule", seq_length_dec=128, num_train_samples=MOCK_SAMPLES)


def _use_bert_data(partial: run.Partial) -> None:
    """Set the data of a recipe to mock data for BERT: masked tokens and sentence pairs."""
    _set_data(partial, "BERTMockDataModule", num_train_samples=MOCK_SAMPLES)


def _use_retrieval_data(partial: run.Partial) -> None:
    """Set the data of a recipe to questions with positive and negative passages; NeMo has no such mock data."""
    _set_data(partial, "CustomRetrievalDataModule", data_root="data/retrieval")


def _set_data(partial: run.Partial, module: str, **more: Any) -> None:
    """Replace the data of a recipe with NeMo's data module `module`, with the same sizes and the arguments `more`."""
    import nemo_run as run
    from nemo.collections import llm

    sizes = {key: getattr(partial.data, key) for key in ("seq_length", "micro_batch_size", "global_batch_size")}
    partial.data = run.Config(getattr(llm, module), **sizes, **more)


@model(**T5, tune=_use_t5_data)
def t5_220m() -> run.Config:
    """T5 220M: encoder and decoder."""
    return nemo("T5Model", "T5Config220M")


@model(**T5, tune=_use_t5_data)
def t5_3b() -> run.Config:
    """T5 3B: encoder and decoder."""
    return nemo("T5Model", "T5Config3B")


@model(**T5, tune=_use_t5_data)
def t5_11b() -> run.Config:
    """T5 11B: encoder and decoder."""
    return nemo("T5Model", "T5Config11B")


@model(**BERT, tune=_use_bert_data)
def bert_110m() -> run.Config:
    """BERT 110M: encoder, masked tokens and next sentence."""
    return nemo("BertModel", "MegatronBertBaseConfig")


@model(**BERT, tune=_use_bert_data)
def bert_340m() -> run.Config:
    """BERT 340M: encoder, masked tokens and next sentence."""
    return nemo("BertModel", "MegatronBertLargeConfig")


@model(**BERT, hf="intfloat/e5-large-v2", tune=_use_retrieval_data)
def e5_340m() -> run.Config:
    """E5 large: BERT for sentence embeddings, contrastive training."""
    return nemo("BertEmbeddingModel", "BertEmbeddingLargeConfig")


@model(**EMBED, hf="meta-llama/Llama-3.2-1B", tune=_use_retrieval_data)
def llama_embedding_1b() -> run.Config:
    """Llama embedding 1B: bidirectional Llama 3.2 1B for sentence embeddings."""
    return nemo("LlamaEmbeddingModel", "Llama32EmbeddingConfig1B")


@model(**EMBED, hf="meta-llama/Llama-3.2-3B", tune=_use_retrieval_data)
def llama_embedding_3b() -> run.Config:
    """Llama embedding 3B: bidirectional Llama 3.2 3B for sentence embeddings."""
    return nemo("LlamaEmbeddingModel", "Llama32EmbeddingConfig3B")


@model(**EMBED, hf="meta-llama/Llama-3.2-1B", tune=_use_retrieval_data)
def llama_reranker_1b() -> run.Config:
    """Llama reranker 1B: Llama 3.2 1B that scores passages for a question."""
    return nemo("ReRankerModel", "Llama32Reranker1BConfig")
