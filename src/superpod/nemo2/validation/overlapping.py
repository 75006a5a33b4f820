"""What communication beside computation takes for granted: who copies parameters, how long a sample is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from superpod.nemo2.validation.reading import PLUGIN, Reader, name_of
from superpod.planner.rules.rules import Violation

CALLBACK = "MegatronCommOverlapCallback"
STRATEGY = "trainer.strategy"


def mxfp8_weights(r: Reader) -> Iterator[Violation]:
    """MXFP8 parameters in the gradients' buffer are gathered beside no forward pass.

    Megatron expects the training loop to copy them into that buffer (megatron-core 0.15.3, core/optimizer/
    optimizer.py:575-579), and NeMo 2.7.3's does not. Run: tests/nemo2/mxfp8_weights.py.
    """
    if r[f"{PLUGIN}.reuse_grad_buf_for_mxfp8_param_ag"] and overlaps(r, "overlap_param_gather"):
        yield Violation(
            "mxfp8_gather",
            "trainer.plugins.reuse_grad_buf_for_mxfp8_param_ag with overlap_param_gather: NeMo 2.7.3 copies no "
            "parameters into the buffer that is gathered, and every weight is 0 from the first step on",
            f"give {CALLBACK} overlap_param_gather=False; or keep parameters in BF16: "
            "trainer.plugins.reuse_grad_buf_for_mxfp8_param_ag=False trainer.plugins.fp8_param_gather=False",
        )


def packed_length(r: Reader) -> Iterator[Violation]:
    """Userbuffers are made for one length, `seq_length` x micro-batch over cp (NeMo's callback, _init_te_userbuffers).

    NeMo's fine-tuning data pads a batch to its own longest sample, unless it is told to pad to the length.
    """
    overlap, specs = callback(r), r["data.packed_sequence_specs"]
    if overlap is None or not overlap.tp_comm_overlap or "FineTuning" not in name_of(r["data"]) or _tp(r) < 2:
        return
    more = r["data.dataset_kwargs"] or {}
    if not (isinstance(more, dict) and more.get("pad_to_max_length")):
        yield Violation(
            "userbuffer_length",
            "tp_comm_overlap with samples of different lengths: Transformer Engine's userbuffers take "
            f"{r['model.config.seq_length']:,} tokens, no other number",
            "write data.dataset_kwargs={'pad_to_max_length': True}" if specs else f"give {CALLBACK} no tp_comm_overlap",
        )


def overlaps(r: Reader, what: str) -> bool:
    """Whether data parallelism communicates beside computation: NeMo's callback decides, where there is one."""
    overlap = callback(r)
    if overlap is None:
        return bool(r[f"{STRATEGY}.ddp.{what}"])
    chosen = getattr(overlap, what)
    return r.gpus > r.gpus_per_replica if chosen is None else chosen


def _tp(r: Reader) -> int:
    return r[f"{STRATEGY}.tensor_model_parallel_size"] or 1


def callback(r: Reader) -> Any:
    """NeMo's overlap callback; None where the configuration has none."""
    callbacks = r["trainer.callbacks"]
    return next((c for c in callbacks or [] if name_of(c) == CALLBACK), None) if isinstance(callbacks, list) else None


RULES = (mxfp8_weights, packed_length)
"""All rules of this file."""
