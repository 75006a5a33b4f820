"""Runs the distinct layers of a model chunk forward and backward with Transformer Engine, with shapes but no values."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from superpod.rehearsal.comparison import communication
from superpod.rehearsal.proof import pipeline_schedule
from superpod.rehearsal.te import recording


@dataclass(frozen=True)
class Step:
    """The attention backends and the communication of one step of a model chunk."""

    attention: frozenset[str]
    """Backends that Transformer Engine selected: flash, fused, unfused."""
    communication: frozenset[str]
    """Lines with the operations of each process group, and the groups of token dispatchers."""


def run(chunk: Any, config: Any, micro_batch: int, *, packed: bool = False) -> Step:
    """Run a model chunk forward and backward on a micro-batch of `micro_batch` samples, with each distinct layer once.

    Raises:
        AssertionError, RuntimeError, ValueError: Transformer Engine or Megatron rejects the inputs of a layer.
        NotParallelError: nothing is communicated in a kind of parallelism of the layout.
    """
    import torch
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.moe_layer import MoELayer

    model = getattr(chunk, "module", chunk)
    moe_utils.get_moe_layer_wise_logging_tracker().clear()  # it stores the number of layers of the previous model
    if not config.cpu_offloading:  # offloading counts the layers
        _remove_repeated_layers(model, config)
    if config.bf16 or config.fp16:
        chunk.to(config.params_dtype)  # as in Megatron's Float16Module
    communication.require_layers(chunk, config.tensor_model_parallel_size)

    dispatchers = set[str]()
    for module in chunk.modules():
        if isinstance(module, MoELayer):
            dispatchers.add(communication.require_experts(module, config))
            vars(module)["token_dispatcher"] = _EvenDispatcher(module)
    for parameter in chunk.parameters():
        parameter.main_grad = torch.empty(tuple(parameter.size()), dtype=torch.float32)
        parameter.grad_added_to_main_grad = False

    _reset_attention_backend()
    backends: set[str] = set()
    with _replace_gpu_functions(backends), communication.record_traffic() as traffic:
        output = _run_forward(model, config, micro_batch, packed)
        torch.autograd.backward(output, torch.empty_like(output))  # Tensor.backward would disable the modes of `cuda`
    communication.require_step(model, config, traffic)
    return Step(frozenset(backends), frozenset(traffic.lines() | dispatchers))


def _reset_attention_backend() -> None:
    """Clear Transformer Engine's cached attention backend, which may be of a different GPU or environment."""
    attention: Any = importlib.import_module(
        "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
    )
    attention._attention_backends["attention_params"] = None


def _remove_repeated_layers(model: Any, config: Any) -> None:
    """Remove layers with the same digest as an earlier layer, because their shapes and checks are the same."""
    import torch

    for stack in (getattr(model, "encoder", None), getattr(model, "decoder", None)):
        if stack is None:
            continue
        kept: dict[str, Any] = {}
        for layer in stack.layers:
            kept.setdefault(recording.hash_layer(layer, config), layer)
        stack.layers = torch.nn.ModuleList(kept.values())
        stack.num_layers_per_pipeline_rank = len(kept)


def _run_forward(model: Any, config: Any, micro_batch: int, packed: bool) -> Any:
    """Run the forward pass of a model chunk, and return its losses, or the hidden states for the next stage."""
    import torch

    tokens = config.seq_length // config.context_parallel_size
    rows = tokens // (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    if not model.pre_process:
        hidden_states = torch.empty(rows, micro_batch, config.hidden_size, dtype=config.params_dtype)
        model.set_input_tensor(hidden_states.requires_grad_())
    forward_parameters = inspect.signature(model.forward).parameters
    ids = torch.empty(micro_batch, tokens, dtype=torch.int64)
    labels = ids if model.post_process else None
    more: dict[str, Any] = {}
    if "tokentype_ids" in forward_parameters:  # BERT, whose second result is the next-sentence prediction
        has_types = getattr(getattr(model, "embedding", None), "tokentype_embeddings", None) is not None
        types = ids if has_types else None
        if getattr(model, "lm_head", None) is None:
            more["hidden_states_only"] = True
        output = model(ids, torch.empty(micro_batch, tokens, dtype=torch.bool), types, labels, **more)
        return output["lm_loss"] if isinstance(output, dict) else output
    if "decoder_input_ids" in forward_parameters:
        return _run_t5(model, config, micro_batch, tokens)
    if packed:
        more["packed_seq_params"] = _build_packed_params(config)
    if "loss_mask" in forward_parameters:
        more["loss_mask"] = torch.empty(micro_batch, tokens)
    return model(ids, ids, _build_mask(model, micro_batch, tokens), labels=labels, **more)


def _build_mask(model: Any, micro_batch: int, tokens: int) -> Any:
    """Return a padding mask [micro-batch, 1, 1, tokens] for bidirectional attention, None for causal attention."""
    import torch
    from megatron.core.transformer.enums import AttnMaskType

    kinds = {getattr(module, "attn_mask_type", None) for module in model.modules() if hasattr(module, "core_attention")}
    return torch.empty(micro_batch, 1, 1, tokens, dtype=torch.bool) if AttnMaskType.padding in kinds else None


def _run_t5(model: Any, config: Any, micro_batch: int, tokens: int) -> Any:
    """Run the encoder and decoder of T5 with the masks of NeMo's data step (collections/llm/t5/model/t5.py)."""
    import torch

    target_length = config.seq_length_dec
    ids, answer = (torch.empty(micro_batch, length, dtype=torch.int64) for length in (tokens, target_length))
    encoder = torch.empty(micro_batch, 1, 1, tokens, dtype=torch.bool)
    decoder = torch.empty(micro_batch, 1, target_length, target_length, dtype=torch.bool)
    cross_mask = (torch.empty(micro_batch, 1, 1, target_length, dtype=torch.bool), encoder)
    return model(ids, answer, encoder, decoder, cross_mask, answer if model.post_process else None)


def _build_packed_params(config: Any) -> Any:
    """Return Megatron's parameters for a packed sequence of two samples of equal length, as in NeMo's data sets.

    NeMo pads each sample, and passes the padded ends, with context parallelism only (gpt/model/base.py).
    """
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    max_length = config.seq_length // 2
    # On the CPU, because Megatron reads the values.
    ends = torch.tensor([0, max_length, config.seq_length], dtype=torch.int32, device="cpu")
    padded: Any = ends if config.context_parallel_size > 1 else None
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=max_length,
        max_seqlen_kv=max_length,
    )


BACKENDS = {"UnfusedDotProductAttention": "unfused", "FusedAttention": "fused", "FlashAttention": "flash"}
"""Classes of Transformer Engine's attention backends."""


def _record_backend(original: Any, backend: str, backends: set[str]) -> Any:
    """Wrap the forward function of an attention backend, so that its use is recorded in `backends`."""

    def forward(self: Any, *arguments: Any, **given: Any) -> Any:
        backends.add(backend)
        return original(self, *arguments, **given)

    return forward


class _EvenDispatcher:
    """Replaces Megatron's token dispatchers, which read the router's values: experts get equal numbers of tokens.

    Each expert runs on the average number of tokens per expert, padded for FP8 by Megatron's own code.
    """

    def __init__(self, layer: Any) -> None:
        self.experts, self.topk = layer.num_local_experts, layer.config.moe_router_topk
        self.shared_experts = getattr(layer, "shared_experts", None) if layer.shared_expert_overlap else None

    def dispatch_preprocess(self, hidden: Any, routing_map: Any, probs: Any) -> tuple[Any, Any]:
        """Return the hidden states with one row per token."""
        self.shape = hidden.shape
        if self.shared_experts is not None:
            self.shared = self.shared_experts(hidden)
        return hidden.view(-1, hidden.shape[-1]), probs

    def token_dispatch(self, hidden: Any, probs: Any) -> tuple[Any, Any]:
        """Return the tokens unchanged."""
        return hidden, probs

    def dispatch_postprocess(self, hidden: Any, probs: Any) -> tuple[Any, Any, Any]:
        """Return (tokens sorted by expert, number of tokens of each expert, probabilities of the tokens)."""
        import torch

        rows_per_expert = max(1, hidden.shape[0] * self.topk // self.experts)
        rows = hidden[:1].expand(rows_per_expert * self.experts, -1).contiguous()
        counts = torch.full((self.experts,), rows_per_expert, dtype=torch.int64, device="cpu")
        return rows, counts, probs.flatten()[:1].expand(rows_per_expert * self.experts)

    def combine_preprocess(self, hidden: Any) -> Any:
        """Return one row per token of the layer's input."""
        return hidden[:1].expand(self.shape[:-1].numel(), -1)

    def token_combine(self, hidden: Any) -> Any:
        """Return the tokens unchanged."""
        return hidden

    def combine_postprocess(self, hidden: Any) -> Any:
        """Return the tokens in the input's shape, plus the output of shared experts."""
        output = hidden.reshape(self.shape)
        return output if self.shared_experts is None else output + self.shared


@contextlib.contextmanager
def _replace_gpu_functions(backends: set[str]) -> Iterator[None]:
    """Replace functions that need a GPU or values within the block, and record the attention backends in `backends`."""
    import torch

    module: Any = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.backends")
    with contextlib.ExitStack() as stack:
        for name, backend in BACKENDS.items():
            owner = getattr(module, name)
            stack.enter_context(mock.patch.object(owner, "forward", _record_backend(owner.forward, backend, backends)))
        stack.enter_context(pipeline_schedule.replace_device_functions())
        # The parameters of distributions, such as the jitter of the router, have no values to validate.
        stack.enter_context(mock.patch.object(torch.distributions.Distribution, "_validate_args", False))
        yield
