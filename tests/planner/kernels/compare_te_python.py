"""Compare `planner/kernels/attention.py` with Transformer Engine's own `get_attention_backend` on layers at random.

python -m tests.planner.kernels.compare_te_python COUNT prints {"chosen": {backend: count}, "wrong": [...]} as JSON;
`near` in place of COUNT writes near_attention.csv.
"""

# ruff: noqa: I001 - the stand-in's entry comes before what it stands in for

from __future__ import annotations

import collections
import itertools
import json
import logging
import os
import random
import sys
from typing import Any

import superpod.rehearsal.te.import_te  # noqa: F401 - first: Transformer Engine in this process
import torch
import transformer_engine_torch as compiled  # pyright: ignore[reportMissingImports]
from packaging.version import Version
from superpod.planner.kernels.attention import Attention, available, choose
from superpod.planner.kernels.fused_attention import FusedAttention, fused_backend
from tests.planner.kernels import compiled_te, near_cases
from transformer_engine.common import recipe  # pyright: ignore[reportMissingImports]
from transformer_engine.pytorch.attention.dot_product_attention import utils  # pyright: ignore[reportMissingImports]

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
RECIPES = {"delayed": recipe.DelayedScaling, "current": recipe.Float8CurrentScaling}
SWITCHES = {"auto": "111", "flash": "100", "fused": "010", "unfused": "001"}


def draw(rng: random.Random) -> Attention:
    """A layer at random, with a backend in about a third of the cases."""

    def mostly(usual: Any, all_: tuple[Any, ...], share: float) -> Any:
        return usual if rng.random() < share else rng.choice(all_)

    seq, head = rng.choice((128, 512, 2048, 4096)), rng.choice((36, 64, 72, 128, 192, 256))
    mla, heads = rng.random() < 0.15, rng.choice((8, 16, 32))
    bias = mostly("no_bias", ("alibi", "post_scale_bias"), 0.8)
    fp8 = mostly("", ("delayed", "current"), 0.85)
    return Attention(
        sm=rng.choice((80, 89, 90, 90, 100, 103)),
        cudnn=rng.choice((90300, 90700, 91002, 91100, 91300, 91301, 91400, 91500, 91800)),
        is_training=rng.random() < 0.8,
        dtype="bf16" if fp8 else mostly("bf16", ("fp16", "fp32"), 0.8),
        qkv_layout=mostly("sbhd_sbhd_sbhd", ("thd_thd_thd", "bshd_bshd_bshd", "sbh3d", "t3hd"), 0.4),
        bias=bias,
        mask=mostly("causal", ("arbitrary", *compiled_te.MASKS), 0.4),
        softmax=mostly("vanilla", compiled_te.SOFTMAXES, 0.7),
        dropout=mostly(0.0, (0.1,), 0.85),
        heads=heads,
        groups=mostly(heads, (1, 2, 8), 0.5),
        seq_q=seq,
        seq_kv=seq if bias == "alibi" else mostly(seq, (128, 4096), 0.85),
        head_qk=192 if mla else head,
        head_v=128 if mla else mostly(head, (64, 128, 512), 0.8),
        window_left=mostly(-1, (128,), 0.75),
        window_right=mostly(0, (-1, 64), 0.8),
        max_logit=rng.random() < 0.05,
        cp=mostly(1, (2,), 0.6),
        cp_comm=rng.choice(("p2p", "a2a", "all_gather", "a2a+p2p")),
        pad_between=rng.random() < 0.2,
        deterministic=rng.random() < 0.15,
        fp8_attention=fp8,
        bias_grad=bias == "post_scale_bias" and rng.random() < 0.5,
        flash=rng.random() < 0.85,
        flash3=rng.random() < 0.2,
        backend=mostly("auto", ("flash", "fused", "unfused"), 0.7),
    )


def _kernel_asked(a: Attention, training: bool, q: int, _kv: int, layout: Any, bias: Any, mask: Any, *rest: Any) -> Any:
    """What Transformer Engine's Python asks its compiled part, answered by the planner's table."""
    softmax, dropout, *sizes = rest
    numbers = ("heads", "groups", "seq_q", "seq_kv", "head_qk", "head_v", "window_left", "window_right", "max_logit")
    names = {number: name for name, number in compiled_te.DTYPES.items()} | {8: "fp8"}
    layer = FusedAttention(
        sm=a.sm,
        cudnn=a.cudnn,
        is_training=training,
        dtype=names[int(q)],
        qkv_layout=compiled_te.LAYOUTS[int(layout)],
        bias=compiled_te.BIASES[int(bias)],
        mask=compiled_te.MASKS[int(mask)],
        softmax=compiled_te.SOFTMAXES[int(softmax)],
        dropout=dropout,
        **dict(zip(numbers, sizes, strict=True)),
    )
    return compiled.NVTE_Fused_Attn_Backend(int(fused_backend(layer)))


def real(a: Attention) -> tuple[tuple[bool, ...], str]:
    """What Transformer Engine's Python finds available, and what it chooses."""
    utils.tex.get_fused_attn_backend = lambda *call: _kernel_asked(a, *call)
    utils.get_device_compute_capability = lambda: divmod(a.sm, 10)
    utils.get_cudnn_version = lambda: (a.cudnn // 10000, a.cudnn // 100 % 100, a.cudnn % 100)
    versions = utils.FlashAttentionUtils
    versions.version = Version("2.7.4.post1")
    versions.set_flash_attention_version()
    versions.is_installed, versions.v3_is_installed, versions.fa3_version = a.flash, a.flash3, Version("3.0.0b1")
    for name, switch in zip(("FLASH", "FUSED", "UNFUSED"), SWITCHES[a.backend], strict=True):
        os.environ[f"NVTE_{name}_ATTN"] = switch
    params = utils.AttentionParams(
        qkv_dtype=DTYPES[a.dtype],
        qkv_layout=a.qkv_layout,
        num_heads=a.heads,
        num_gqa_groups=a.groups,
        max_seqlen_q=a.seq_q,
        max_seqlen_kv=a.seq_kv,
        head_dim_qk=a.head_qk,
        head_dim_v=a.head_v,
        attn_mask_type=a.mask,
        window_size=(a.window_left, a.window_right),
        core_attention_bias_type=a.bias,
        core_attention_bias_shape="1hss" if a.bias == "post_scale_bias" else None,
        core_attention_bias_requires_grad=a.bias_grad,
        pad_between_seqs=a.pad_between,
        attention_dropout=a.dropout,
        context_parallel=a.cp > 1,
        cp_comm_type=a.cp_comm,
        deterministic=a.deterministic,
        is_training=a.is_training,
        fp8=bool(a.fp8_attention),
        fp8_meta={"recipe": RECIPES[a.fp8_attention](fp8_dpa=True)} if a.fp8_attention else None,
        softmax_type=a.softmax,
        return_max_logit=a.max_logit,
    )
    flash, _, fused, _, unfused, there = utils.get_attention_backend(params)
    return tuple(map(bool, there)), "flash" if flash else "fused" if fused else "unfused" if unfused else ""


def main(count: int) -> None:
    """Compare so many layers."""
    logging.disable(logging.CRITICAL)
    rng, chosen, wrong = random.Random(1), collections.Counter(), []
    for _ in range(count):
        layer = draw(rng)
        theirs, ours = real(layer), (available(layer), choose(layer).backend)
        chosen[theirs[1]] += 1
        wrong += [str((theirs, ours, layer))] * (theirs != ours)
    print(json.dumps({"chosen": chosen, "wrong": wrong[:5]}))


def write_near(count: int) -> None:
    """Write the layers that hang on one rule, of so many drawn, with the answers of Transformer Engine's Python."""
    logging.disable(logging.CRITICAL)
    drawn = itertools.islice(near_cases.attention_layers(1), count)
    layers = near_cases.choose_near(drawn, near_cases.ATTENTION_TABLES, near_cases.attention_answer)
    near_cases.write(near_cases.ATTENTION_ANSWERS, [(layer, near_cases.answer(*real(layer))) for layer in layers])


if __name__ == "__main__":
    write_near(40_000) if sys.argv[1] == "near" else main(int(sys.argv[1]))
