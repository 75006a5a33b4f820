"""Layers that hang on one condition of a table, with the answers of Transformer Engine 2.9.0 itself.

near_attention.csv has the answers of its Python (`get_attention_backend`; compare_te_python.py lays the compiled part
under it), near_kernels.csv those of its compiled library (compiled_te.py). For each condition some layers that this
condition alone refuses, so that a table without it answers otherwise. To make them again:

    python -m tests.planner.kernels.compare_te_python near
    LD_LIBRARY_PATH=$STUBS python tests/planner/kernels/compiled_te.py near $LIBRARY $STUBS
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from superpod.planner.kernels import attention, fused_attention
from superpod.planner.kernels.attention import Attention
from superpod.planner.kernels.fused_attention import FusedAttention

Layer = TypeVar("Layer", Attention, FusedAttention)

ATTENTION_ANSWERS = Path(__file__).with_name("near_attention.csv")
KERNEL_ANSWERS = Path(__file__).with_name("near_kernels.csv")
EACH = 3
"""Layers kept of a condition."""

ATTENTION_TABLES = ("FLASH2", "FLASH3", "FUSED", "UNFUSED")
KERNEL_TABLES = ("FP8", "MAX512", "ARBITRARY")

_SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"head_qk": 192, "head_v": 128},
    {"head_qk": 128, "head_v": 64},
    {"head_qk": 64, "head_v": 64},
)
_MASKS = ("no_mask", "padding", "causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right")
_LAYOUTS = ("sbhd_sbhd_sbhd", "bshd_bshd_bshd", "thd_thd_thd", "sb3hd", "t3hd", "bshd_bs2hd")
_CHANGES: dict[str, tuple[Any, ...]] = {
    "sm": (75, 80, 89, 90, 100, 103),
    "cudnn": (90300, 90700, 91002, 91301, 91400, 91800),
    "is_training": (False,),
    "dtype": ("fp16", "fp32"),
    "qkv_layout": _LAYOUTS,
    "bias": ("alibi", "post_scale_bias", "pre_scale_bias"),
    "mask": ("arbitrary", *_MASKS),
    "softmax": ("learnable", "off-by-one"),
    "dropout": (0.1,),
    "groups": (1, 8, 3),
    "seq_q": (128, 500, 4096),
    "seq_kv": (128, 4096),
    "head_qk": (36, 64, 192, 256, 512),
    "head_v": (36, 64, 128, 256, 512),
    "window_left": (128,),
    "window_right": (-1, 64),
    "max_logit": (True,),
    "cp": (2,),
    "cp_comm": ("a2a", "all_gather", "a2a+p2p"),
    "pad_between": (True,),
    "deterministic": (True,),
    "bias_grad": (True,),
    "flash": (False, True),
    "flash3": (True,),
    "backend": ("flash", "fused", "unfused"),
    "fp8_attention": ("delayed", "current"),
}
_KERNEL_CHANGES: dict[str, tuple[Any, ...]] = {
    "sm": (80, 86, 90, 100, 103),
    "cudnn": (8900, 8902, 8903, 8906, 8907, 90000, 90100, 90300, 90600, 90700, 91000, 91001, 91300, 91301),
    "dtype": ("fp32", "fp16", "bf16", "fp8"),
    "seq_q": (64, 100, 128, 512, 2048, 2**20),
    "seq_kv": (64, 100, 128, 512, 2048, 2**20),
    "heads": (8, 64),
    "wanted": (0, 1, 2),
}


def _near(rng: random.Random, plain: Layer, changes: dict[str, tuple[Any, ...]]) -> Layer:
    """A plain layer with up to three of its fields changed."""
    names = rng.sample(list(changes), rng.randint(1, 3))
    return replace(plain, **{name: rng.choice(changes[name]) for name in names})


def attention_layers(seed: int) -> Iterator[Attention]:
    """Layers near the plain ones, without end, that Transformer Engine's front end would let through."""
    rng = random.Random(seed)
    while True:
        values: dict[str, Any] = {"seq_q": 2048, "seq_kv": 2048, "window_right": 0, "head_qk": 128, "head_v": 128}
        values |= {"flash": rng.random() < 0.5, "flash3": rng.random() < 0.3, **rng.choice(_SHAPES)}
        values |= {"fp8_attention": rng.choice(("", "", "delayed", "current"))}
        plain = Attention(sm=rng.choice((80, 90, 100)), cudnn=rng.choice((91301, 91400)), **values)
        layer = _near(rng, plain, _CHANGES)
        dtype = "bf16" if layer.fp8_attention else layer.dtype
        layer = replace(layer, dtype=dtype, bias_grad=layer.bias == "post_scale_bias")
        if layer.bias != "alibi" or layer.seq_q == layer.seq_kv:  # the real function makes no slopes of two lengths
            yield layer


def kernel_layers(seed: int) -> Iterator[FusedAttention]:
    """As `attention_layers`, what the compiled function is asked."""
    rng = random.Random(seed)
    own = {f.name for f in fields(FusedAttention)}
    changes = {name: values for name, values in _CHANGES.items() if name in own} | _KERNEL_CHANGES | {"mask": _MASKS}
    long: dict[str, Any] = {"qkv_layout": "thd_thd_thd", "mask": "padding_causal", "seq_q": 2**20, "seq_kv": 2**20}
    while True:
        short = rng.random() < 0.5
        seq, head = (512, 64) if short else (2048, 128)
        values: dict[str, Any] = {"seq_q": seq, "seq_kv": seq, "head_qk": head, "head_v": head}
        values |= {"qkv_layout": rng.choice(_LAYOUTS), "mask": rng.choice(("causal", "padding_causal"))}
        values |= {"dtype": rng.choice(("bf16", "bf16", "fp8")), "wanted": 0 if short else None}
        if rng.random() < 0.02:  # offsets of 64 bits
            values |= {**long, "heads": 64, "groups": 64, "head_qk": 64, "head_v": 64, "dtype": "bf16", "wanted": None}
        cudnn = rng.choice((8907, 90100, 90300, 90700, 91301))
        yield _near(rng, FusedAttention(sm=rng.choice((80, 90, 100)), cudnn=cudnn, **values), changes)


def attention_answer(a: Attention) -> str:
    """What the planner's tables say: the backends that can be taken, and the one that is."""
    return answer(attention.available(a), attention.choose(a).backend)


def kernel_answer(a: FusedAttention) -> str:
    """The planner's kernel, as its number."""
    return str(int(fused_attention.fused_backend(a)))


def answer(available: tuple[bool, ...], chosen: str) -> str:
    """`flash unfused: flash`"""
    names = zip(("flash", "fused", "unfused"), available, strict=True)
    return f"{' '.join(name for name, there in names if there)}: {chosen}"


@contextmanager
def without(table: str, rule: str) -> Iterator[None]:
    """The tables without one rule, which ANY_FLASH gives to both versions of FlashAttention."""
    owner = fused_attention if table in KERNEL_TABLES else attention
    names = ("FLASH2", "FLASH3") if table == "ANY_FLASH" else (table,)
    whole = {name: getattr(owner, name) for name in names}
    try:
        for name, rules in whole.items():
            setattr(owner, name, tuple(one for one in rules if one[0] != rule))
        yield
    finally:
        for name, rules in whole.items():
            setattr(owner, name, rules)


def rules_of(table: str) -> list[str]:
    """The names of a table's own rules."""
    rules = [rule[0] for rule in getattr(fused_attention if table in KERNEL_TABLES else attention, table)]
    shared = [rule.text for rule in attention.ANY_FLASH] if table in ("FLASH2", "FLASH3") else []
    return [name for name in rules if name not in shared]


def _alone(layer: FusedAttention, table: str) -> tuple[str, str] | None:
    """The one rule of a table against a layer."""
    if isinstance(layer, Attention):
        broken = [reason.text for reason in attention.reasons_against(getattr(attention, table), layer)]
    else:
        broken = [c.name for c in fused_attention.unmet_conditions(getattr(fused_attention, table), layer)]
    if len(broken) != 1:
        return None
    return (table if broken[0] in rules_of(table) else "ANY_FLASH"), broken[0]


def choose_near(layers: Iterable[Layer], tables: tuple[str, ...], of: Callable[[Layer], str]) -> list[Layer]:
    """Of many layers, `EACH` for each rule of the tables that it decides alone."""
    pinned: dict[tuple[str, str], int] = {}
    kept: dict[Layer, None] = {}
    for layer in layers:
        for key in filter(None, (_alone(layer, table) for table in tables)):
            if pinned.get(key, 0) < EACH:
                whole = of(layer)
                with without(*key):
                    decided = of(layer) != whole
                if decided:
                    pinned[key] = pinned.get(key, 0) + 1
                    kept[layer] = None
    own = [
        (table, rule)
        for table in (*tables, *(("ANY_FLASH",) if "FLASH2" in tables else ()))
        for rule in rules_of(table)
    ]
    print("decided by no layer:", *(key for key in own if key not in pinned), sep="\n  ")
    return list(kept)


def write(path: Path, rows: Iterable[tuple[Layer, str]]) -> None:
    """Write layers and their answers."""
    with path.open("w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        for number, (layer, answer) in enumerate(rows):
            if number == 0:
                writer.writerow([f.name for f in fields(layer)] + ["answer"])
            writer.writerow([getattr(layer, f.name) for f in fields(layer)] + [answer])


def read(path: Path, kind: type[Layer]) -> Iterator[tuple[Layer, str]]:
    """The layers of a file, and Transformer Engine's answers."""
    default = kind(sm=90, cudnn=90000)
    with path.open() as rows:
        for row in csv.DictReader(rows):
            answer = row.pop("answer")
            yield replace(default, **{name: _value(getattr(default, name), text) for name, text in row.items()}), answer


def _value(default: Any, text: str) -> Any:
    if isinstance(default, bool):
        return text == "True"
    if default is None:
        return int(text) if text else None
    return type(default)(text)
