"""Rules of NeMo 2.7.3's model classes, in the form of `rules.py`: what a family refuses that Megatron-Core would take.

The comment beside a rule names NeMo's file and class; which models have the fact is in `data/models/*.toml`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.planner.rules.rules import JobInputs, Rule, near_divisors, near_multiples

if TYPE_CHECKING:
    from superpod.planner.arrays import Boolean
    from superpod.planner.models import ModelShape

CALLED = {"pp": "pipeline parallelism", "cp": "context parallelism", "vp": "virtual pipeline stages"}
"""Degrees of `ModelShape.refuses` in words."""


def _refused(degree: str, instead: str) -> Rule[JobInputs]:
    def broken(f: JobInputs) -> Boolean:
        given = f.interleaved if degree == "vp" else getattr(f, degree) > 1
        return given & (degree in f.model.refuses.split())

    def says(f: JobInputs) -> tuple[str, str]:
        name, size = f.model.name, getattr(f, degree)
        return f"NeMo 2.7.3's class of {name} takes no {CALLED[degree]}, and {degree} is {size}", instead

    return Rule(f"family_{degree}", broken, says)


def _crosses_chunks(f: JobInputs) -> Boolean:
    """Whether context parallelism cuts a sequence inside a chunk of attention."""
    m, seq = f.model, f.job.seq
    if not m.chunked or seq <= m.window:
        return False
    return (f.cp > 1) & (seq % (2 * f.cp * m.window) != 0)


def _whole_layers(model: ModelShape) -> int:
    """Layers as NeMo counts them."""
    return model.layers // model.letters_per_layer


def _recomputes_cross_attention(f: JobInputs) -> Boolean:
    """Whether an encoder's output and its mask pass a function of Megatron's that recomputes."""
    return f.model.cross_attention & ((f.recompute == 2) | f.recomputes("core_attn"))


FAMILY: tuple[Rule[JobInputs], ...] = (
    # gemma2.py Gemma2DotProductAttention.__init__; gemma3.py and t5.py, configure_model; bert/loss.py and reranker.py,
    # the forward pass of each loss. E5 on several stages is not refused, and is another model: each norms its input
    # (bert/model/base.py, TransformerBlockWithPostLNSupport), which the proof of the recipes found.
    _refused("pp", "set pp 1; tp splits it as well"),
    _refused("cp", "set cp 1; tp splits it as well"),
    _refused("vp", "drop vp"),
    Rule(
        "capped_window",  # gemma2.py: the window is in the mask, and without one (data modules beside TE) is left out
        lambda f: f.model.soft_capped & bool(f.model.window) & (f.job.seq > f.model.window),
        lambda f: (
            f"{f.model.name} has windows of {f.model.window} tokens, which NeMo 2.7.3's class applies only to a mask "
            f"that its data modules do not give, and seq is {f.job.seq}",
            f"set seq {f.model.window}",
        ),
    ),
    Rule(
        "chunk_cp",  # llama4_utils.py Llama4SelfAttention.forward
        _crosses_chunks,
        lambda f: (
            f"context parallelism cuts the sequence into 2 x cp {f.cp} parts of whole attention chunks of "
            f"{f.model.window} tokens, and seq is {f.job.seq}",
            f"set cp 1, or nearest: seq {near_multiples(2 * f.cp * f.model.window, f.job.seq)}",
        ),
    ),
    Rule(
        "layers_left_over",  # hyena_block.py HyenaStack._select_layers_for_pipeline_parallel: a floor, and no assertion
        lambda f: (f.model.letters_per_layer > 1) & (_whole_layers(f.model) % f.pp != 0),
        lambda f: (
            f"NeMo 2.7.3's class of {f.model.name} gives each of {f.pp} pipeline ranks "
            f"{_whole_layers(f.model) // f.pp} layers and drops the rest of {_whole_layers(f.model)} without a word",
            f"nearest: pp {near_divisors(_whole_layers(f.model), int(f.pp))}",
        ),
    ),
    Rule(
        "recompute_cross",  # t5.py:67, the mask is a tuple; Megatron's tensor_parallel/random.py CheckpointFunction
        _recomputes_cross_attention,
        lambda f: (
            f"Megatron-Core 0.15.3 recomputes with tensors only, and the mask of {f.model.name}'s cross-attention is a "
            "tuple of two",
            "set recompute none",
        ),
    ),
    Rule(
        "delayed_shared",  # Megatron, shared_experts.py:65: save_original_input; TE 2.9, module/linear.py:173
        lambda f: (f.job.precision == "fp8ds") & bool(f.model.shared_ffn) & (f.recomputes("shared_experts") == 0),
        lambda f: (
            "shared experts keep their original input in Megatron-Core 0.15, which Transformer Engine 2.9 refuses "
            "under delayed scaling (fp8ds)",
            "set precision fp8cs, or recompute_modules shared_experts and moe_shared_expert_overlap false",
        ),
    ),
)
"""Rules of NeMo's classes and of Megatron's blocks of a family, by facts of the model."""
