"""Forward and backward of a chunk's distinct layers through Transformer Engine's Python, with shapes and no numbers."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from superpod.rehearsal import communication, schedule
from superpod.rehearsal.te import recording


@dataclass(frozen=True)
class Step:
    """The attention backends and the communication of one step of a model chunk."""

    attention: frozenset[str]
    """backends that Transformer Engine chose: flash, fused, unfused"""
    communication: frozenset[str]
    """operations by process group, and the groups of token dispatchers"""


def run(chunk: Any, config: Any, micro_batch: int, *, packed: bool = False) -> Step:
    """Run the chunk's model on one micro-batch, each distinct layer once, and its backward pass.

    Raises:
        AssertionError, RuntimeError, ValueError: Transformer Engine or Megatron refuses a layer's inputs.
        NotParallelError: a parallel size of the layout is not communicated over.
    """
    import torch
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.moe_layer import MoELayer

    model = _innermost(chunk)
    moe_utils.get_moe_layer_wise_logging_tracker().clear()  # it has the number of layers of the last model
    if not config.cpu_offloading:  # which counts the layers
        _keep_distinct(model, config)
    if config.bf16 or config.fp16:
        chunk.to(config.params_dtype)  # as Megatron's Float16Module does with what was made in FP32
    communication.require_layers(chunk, config.tensor_model_parallel_size)
    dispatched = set[str]()
    for module in chunk.modules():
        if isinstance(module, MoELayer):
            dispatched.add(communication.require_experts(module, config))
            vars(module)["token_dispatcher"] = _EvenDispatcher(module)
    for parameter in chunk.parameters():
        parameter.main_grad = torch.empty(tuple(parameter.size()), dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
    _forget_last_attention()
    taken: set[str] = set()
    with _on_one_stream(taken), communication.recorded() as traffic:
        output = _forward(model, config, micro_batch, packed)
        torch.autograd.backward(output, torch.empty_like(output))  # Tensor.backward would leave the modes of `cuda`
    communication.require_step(model, config, traffic)
    return Step(frozenset(taken), frozenset(traffic.lines() | dispatched))


def _forget_last_attention() -> None:
    """Make Transformer Engine choose the attention backend anew.

    It keeps its last choice for inputs that are alike; that may have been made for another GPU or with other variables.
    """
    attention: Any = importlib.import_module(
        "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
    )
    attention._attention_backends["attention_params"] = None


def _innermost(chunk: Any) -> Any:
    return getattr(chunk, "module", chunk)


def _keep_distinct(model: Any, config: Any) -> None:
    """Drop layers that are constructed like another one: their shapes, and so their checks, are the same."""
    import torch

    for stack in (getattr(model, "encoder", None), getattr(model, "decoder", None)):
        if stack is None:
            continue
        kept: dict[str, Any] = {}
        for layer in stack.layers:
            kept.setdefault(recording.of_modules(layer, config), layer)
        stack.layers = torch.nn.ModuleList(kept.values())
        stack.num_layers_per_pipeline_rank = len(kept)


def _forward(model: Any, config: Any, micro_batch: int, packed: bool) -> Any:
    """The model's output, or what it gives to the next stage."""
    import torch

    tokens = config.seq_length // config.context_parallel_size
    rows = tokens // (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    if not model.pre_process:
        hidden = torch.empty(rows, micro_batch, config.hidden_size, dtype=config.params_dtype)
        model.set_input_tensor(hidden.requires_grad_())
    given = inspect.signature(model.forward).parameters
    ids = torch.empty(micro_batch, tokens, dtype=torch.int64)
    labels = ids if model.post_process else None
    if "tokentype_ids" in given:  # BERT, whose second result is whether one sentence follows another
        types = ids if getattr(getattr(model, "embedding", None), "tokentype_embeddings", None) is not None else None
        embeds = {"hidden_states_only": True} if getattr(model, "lm_head", None) is None else {}
        output = model(ids, torch.empty(micro_batch, tokens, dtype=torch.bool), types, labels, **embeds)
        return output["lm_loss"] if isinstance(output, dict) else output
    if "decoder_input_ids" in given:  # T5
        return _encode_and_decode(model, config, micro_batch, tokens)
    more: dict[str, Any] = {"packed_seq_params": _packed(config)} if packed else {}
    if "loss_mask" in given:
        more["loss_mask"] = torch.empty(micro_batch, tokens)
    return model(ids, ids, _mask(model, micro_batch, tokens), labels=labels, **more)


def _mask(model: Any, micro_batch: int, tokens: int) -> Any:
    """Of padded tokens, for models that look both ways; the others need none."""
    import torch
    from megatron.core.transformer.enums import AttnMaskType

    looks = {getattr(module, "attn_mask_type", None) for module in model.modules() if hasattr(module, "core_attention")}
    return torch.empty(micro_batch, 1, 1, tokens, dtype=torch.bool) if AttnMaskType.padding in looks else None


def _encode_and_decode(model: Any, config: Any, micro_batch: int, tokens: int) -> Any:
    """T5, with the masks of NeMo's data step (collections/llm/t5/model/t5.py)."""
    import torch

    targets = config.seq_length_dec
    ids, answer = (torch.empty(micro_batch, length, dtype=torch.int64) for length in (tokens, targets))
    encoder = torch.empty(micro_batch, 1, 1, tokens, dtype=torch.bool)
    decoder = torch.empty(micro_batch, 1, targets, targets, dtype=torch.bool)
    cross = (torch.empty(micro_batch, 1, 1, targets, dtype=torch.bool), encoder)
    return model(ids, answer, encoder, decoder, cross, answer if model.post_process else None)


def _packed(config: Any) -> Any:
    """Samples of a pack, as NeMo's packed data sets describe them: here two of half its length.

    Only for context parallelism does NeMo pad each of them, and then names both ends (gpt/model/base.py).
    """
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    longest = config.seq_length // 2
    ends = torch.tensor([0, longest, config.seq_length], dtype=torch.int32, device="cpu")  # Megatron reads the numbers
    padded: Any = ends if config.context_parallel_size > 1 else None
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


BACKENDS = {"UnfusedDotProductAttention": "unfused", "FusedAttention": "fused", "FlashAttention": "flash"}
"""Classes of Transformer Engine's attention backends."""


def _noted(original: Any, backend: str, taken: set[str]) -> Any:
    """A backend's forward that notes that Transformer Engine chose it."""

    def forward(self: Any, *arguments: Any, **given: Any) -> Any:
        taken.add(backend)
        return original(self, *arguments, **given)

    return forward


class _EvenDispatcher:
    """Stands for Megatron's dispatchers, which count tokens: every expert of this rank gets as many.

    Experts run on the tokens that this rank would have on average, padded for FP8 by Megatron's own code.
    """

    def __init__(self, layer: Any) -> None:
        self.experts, self.topk = layer.num_local_experts, layer.config.moe_router_topk
        self.shared_experts = getattr(layer, "shared_experts", None) if layer.shared_expert_overlap else None

    def dispatch_preprocess(self, hidden: Any, routing_map: Any, probs: Any) -> tuple[Any, Any]:
        """The tokens as rows."""
        self.shape = hidden.shape
        if self.shared_experts is not None:
            self.shared = self.shared_experts(hidden)
        return hidden.view(-1, hidden.shape[-1]), probs

    def token_dispatch(self, hidden: Any, probs: Any) -> tuple[Any, Any]:
        """Nothing is sent."""
        return hidden, probs

    def dispatch_postprocess(self, hidden: Any, probs: Any) -> tuple[Any, Any, Any]:
        """(tokens by expert, their number for every expert, their probabilities)"""
        import torch

        rows_per_expert = max(1, hidden.shape[0] * self.topk // self.experts)
        rows = hidden[:1].expand(rows_per_expert * self.experts, -1).contiguous()
        counts = torch.full((self.experts,), rows_per_expert, dtype=torch.int64, device="cpu")
        return rows, counts, probs.flatten()[:1].expand(rows_per_expert * self.experts)

    def combine_preprocess(self, hidden: Any) -> Any:
        """As many rows as came in."""
        return hidden[:1].expand(self.shape[:-1].numel(), -1)

    def token_combine(self, hidden: Any) -> Any:
        """Nothing is sent."""
        return hidden

    def combine_postprocess(self, hidden: Any) -> Any:
        """The tokens as they came in, with what shared experts add to them."""
        output = hidden.reshape(self.shape)
        return output if self.shared_experts is None else output + self.shared


@contextlib.contextmanager
def _on_one_stream(taken: set[str]) -> Iterator[None]:
    """What a step asks of a GPU beside tensors: a current device, ranges for a profiler."""
    import torch

    backends: Any = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.backends")
    with contextlib.ExitStack() as stack:
        for name, backend in BACKENDS.items():
            owner = getattr(backends, name)
            stack.enter_context(mock.patch.object(owner, "forward", _noted(owner.forward, backend, taken)))
        stack.enter_context(schedule.without_device())
        # of a distribution's parameters, such as those of the router's jitter: here they have no values
        stack.enter_context(mock.patch.object(torch.distributions.Distribution, "_validate_args", False))
        yield
