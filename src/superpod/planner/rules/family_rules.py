"""Rules for restrictions of NeMo 2.7.3's model classes that Megatron-Core does not have, in the form of `rules.py`.

The comment next to a rule names NeMo's file and class. `data/models/*.toml` specifies which models are affected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.planner.rules.rules import JobInputs, Rule, near_divisors, near_multiples

if TYPE_CHECKING:
    from superpod.planner.arrays import Boolean
    from superpod.planner.models import ModelShape

DEGREE_NAMES = {"pp": "pipeline parallelism", "cp": "context parallelism", "vp": "virtual pipeline stages"}
"""Names of the degrees in `ModelShape.refuses`."""


def _unsupported_degree(degree: str, fix: str) -> Rule[JobInputs]:
    """Create a rule for models whose NeMo class does not support `degree` (pp, cp or vp)."""

    def is_broken(f: JobInputs) -> Boolean:
        is_set = f.interleaved if degree == "vp" else getattr(f, degree) > 1
        return is_set & (degree in f.model.refuses.split())

    def explain(f: JobInputs) -> tuple[str, str]:
        size = getattr(f, degree)
        message = f"NeMo 2.7.3 does not support {DEGREE_NAMES[degree]} for {f.model.name}, but {degree} is {size}"
        return message, fix

    return Rule(f"family_{degree}", is_broken, explain)


def _splits_attention_chunks(f: JobInputs) -> Boolean:
    """Return whether context parallelism would split a chunk of chunked attention (Llama 4)."""
    m, seq = f.model, f.job.seq
    if not m.chunked or seq <= m.window:
        return False
    return (f.cp > 1) & (seq % (2 * f.cp * m.window) != 0)


def _nemo_layers(model: ModelShape) -> int:
    """Return the number of layers as NeMo's class counts them; a layer may have several letters of the pattern."""
    return model.layers // model.letters_per_layer


FAMILY: tuple[Rule[JobInputs], ...] = (
    # gemma2.py Gemma2DotProductAttention.__init__; gemma3.py and t5.py, configure_model; bert/loss.py and reranker.py,
    # the forward pass of each loss. NeMo builds E5 on several stages, but as a different model, in which every stage
    # normalizes its input (bert/model/base.py, TransformerBlockWithPostLNSupport).
    _unsupported_degree("pp", "set pp 1; use tp instead"),
    _unsupported_degree("cp", "set cp 1; use tp instead"),
    _unsupported_degree("vp", "remove vp"),
    Rule(
        "capped_window",  # gemma2.py: the window is part of the mask, and is ignored without a mask
        lambda f: f.model.soft_capped & bool(f.model.window) & (f.job.seq > f.model.window),
        lambda f: (
            f"seq {f.job.seq} exceeds the attention window of {f.model.name}, {f.model.window} tokens, which NeMo "
            "2.7.3 applies only through an attention mask that its data modules do not provide",
            f"set seq {f.model.window}",
        ),
    ),
    Rule(
        "chunk_cp",  # llama4_utils.py Llama4SelfAttention.forward
        _splits_attention_chunks,
        lambda f: (
            f"with cp {f.cp}, seq must be a multiple of 2 x cp {f.cp} x the attention chunk of {f.model.window} "
            f"tokens, not {f.job.seq}",
            f"set cp 1, or nearest: seq {near_multiples(2 * f.cp * f.model.window, f.job.seq)}",
        ),
    ),
    Rule(
        "layers_left_over",  # hyena_block.py HyenaStack._select_layers_for_pipeline_parallel rounds down
        lambda f: (f.model.letters_per_layer > 1) & (_nemo_layers(f.model) % f.pp != 0),
        lambda f: (
            f"the {_nemo_layers(f.model)} layers of {f.model.name} must be divisible by pp {f.pp}: NeMo 2.7.3 builds "
            f"{_nemo_layers(f.model) // f.pp} per stage and silently drops the others",
            f"nearest: pp {near_divisors(_nemo_layers(f.model), int(f.pp))}",
        ),
    ),
    Rule(
        "recompute_cross",  # t5.py:67, the mask is a tuple; Megatron's tensor_parallel/random.py CheckpointFunction
        lambda f: f.model.cross_attention & ((f.recompute == 2) | f.recomputes("core_attn")),
        lambda f: (
            f"activation checkpointing in Megatron-Core 0.15.3 accepts only tensors, but the cross-attention mask of "
            f"{f.model.name} is a tuple",
            "set recompute none",
        ),
    ),
    Rule(
        "delayed_shared",  # Megatron, shared_experts.py:65: save_original_input; TE 2.9, module/linear.py:173
        lambda f: (f.job.precision == "fp8ds") & bool(f.model.shared_ffn) & (f.recomputes("shared_experts") == 0),
        lambda f: (
            "shared experts save their original input in Megatron-Core 0.15, which Transformer Engine 2.9 does not "
            "support with delayed scaling (fp8ds)",
            "set precision fp8cs, or recompute_modules shared_experts and moe_shared_expert_overlap false",
        ),
    ),
)
"""Rules of NeMo's model classes and Megatron's blocks, depending on properties of the model."""
