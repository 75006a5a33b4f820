"""Check the requirements of overlapping communication with computation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from superpod.nemo2.validation.reading import PLUGIN, Reader, class_name
from superpod.planner.rules.rules import Violation

CALLBACK = "MegatronCommOverlapCallback"
STRATEGY = "trainer.strategy"


def check_mxfp8_gather(r: Reader) -> Iterator[Violation]:
    """Yield a violation if MXFP8 parameters in the gradient buffer are gathered during the forward pass.

    Megatron expects the training loop to copy them into that buffer (megatron-core 0.15.3, core/optimizer/
    optimizer.py:575-579), which the loop of NeMo 2.7.3 does not do. tests/nemo2/build/mxfp8_weights.py reproduces it.
    """
    if r[f"{PLUGIN}.reuse_grad_buf_for_mxfp8_param_ag"] and is_overlapped(r, "overlap_param_gather"):
        yield Violation(
            "mxfp8_gather",
            "trainer.plugins.reuse_grad_buf_for_mxfp8_param_ag with overlap_param_gather: NeMo 2.7.3 does not copy the "
            "parameters into the buffer that is gathered, so every weight is 0 from the first step on",
            f"set overlap_param_gather=False in {CALLBACK}, or keep parameters in BF16: "
            "trainer.plugins.reuse_grad_buf_for_mxfp8_param_ag=False trainer.plugins.fp8_param_gather=False",
        )


def check_userbuffer_length(r: Reader) -> Iterator[Violation]:
    """Yield a violation for userbuffers with sequences of different lengths.

    The size of the buffers is fixed: `seq_length` x micro-batch size / cp (NeMo's callback, _init_te_userbuffers).
    NeMo's fine-tuning data pads each batch only to its longest sample, unless `pad_to_max_length` is set.
    """
    callback, tp = find_callback(r), r[f"{STRATEGY}.tensor_model_parallel_size"] or 1
    if callback is None or not callback.tp_comm_overlap or tp < 2 or "FineTuning" not in class_name(r["data"]):
        return
    dataset_kwargs = r["data.dataset_kwargs"] or {}
    if isinstance(dataset_kwargs, dict) and dataset_kwargs.get("pad_to_max_length"):
        return
    is_packed = r["data.packed_sequence_specs"]
    fix = "data.dataset_kwargs={'pad_to_max_length': True}" if is_packed else f"tp_comm_overlap=False in {CALLBACK}"
    yield Violation(
        "userbuffer_length",
        "tp_comm_overlap with samples of different lengths: Transformer Engine's userbuffers need sequences of "
        f"exactly {r['model.config.seq_length']:,} tokens",
        f"set {fix}",
    )


def is_overlapped(r: Reader, field: str) -> bool:
    """Return whether an overlap of data-parallel communication is enabled.

    `field` is `overlap_grad_reduce` or `overlap_param_gather`. NeMo's callback takes precedence over the strategy.
    """
    callback = find_callback(r)
    if callback is None:
        return bool(r[f"{STRATEGY}.ddp.{field}"])
    enabled = getattr(callback, field)
    if enabled is None:  # the callback enables it if there are several replicas
        return r.gpus > r.gpus_per_replica
    return enabled


def find_callback(r: Reader) -> Any:
    """Return the configuration of NeMo's overlap callback; None if there is none."""
    callbacks = r["trainer.callbacks"]
    if not isinstance(callbacks, list):
        return None
    return next((callback for callback in callbacks if class_name(callback) == CALLBACK), None)


RULES = (check_mxfp8_gather, check_userbuffer_length)
