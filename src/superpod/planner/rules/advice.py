"""Layouts that are legal but a bad idea: rules of thumb over the same inputs as the rules of legality."""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.planner.layout import MODULES
from superpod.planner.rules.rules import JobInputs, Rule

if TYPE_CHECKING:
    from superpod.planner.arrays import Integer

IDLE = {"moe": "moe", "shared_experts": "moe", "mlp": "mlp"}
"""Modules that selective recomputation takes without an error, and the block without which it does nothing."""


def _widths(f: JobInputs) -> dict[str, Integer]:
    """Sizes of one rank's matrix products, elements; those that do not divide are left out."""
    m = f.model
    sizes: dict[str, tuple[Integer, Integer]] = {"hidden": (m.hidden, 1), "vocab / tp": (m.padded_vocab(f.tp), f.tp)}
    sizes |= {"head_dim": (m.channels, 1)} if "attention" in m.kinds else {}
    sizes |= {"ffn / tp": (m.ffn, f.tp)} if "mlp" in m.kinds else {}
    sizes |= {"expert_ffn / etp": (m.expert_ffn, f.etp)} if "moe" in m.kinds else {}
    sizes |= {"tokens of a rank": (f.job.seq * f.mbs, f.cp * (f.tp if f.sp else 1))}
    return {name: size // by for name, (size, by) in sizes.items() if size and size % by == 0}


def _multiple(f: JobInputs) -> int:
    """Tensor Cores run at full speed on multiples of this many elements: 16 bytes, and 16 elements in FP8 or FP4."""
    precision = f.job.precision
    return {"fp32": 1, "tf32": 4, "bf16": 8, "fp16": 8}.get(precision, 16)


def _misaligned(f: JobInputs) -> dict[str, Integer]:
    return {name: size for name, size in _widths(f).items() if size % _multiple(f)}


def _idle(f: JobInputs) -> list[str]:
    """Modules that the layout recomputes although the model has none of them."""
    kinds = f.model.kinds
    taken = [name for name in IDLE if f.modules >> MODULES.index(name) & 1]
    idle = [name for name in taken if IDLE[name] not in kinds]
    return idle + ["shared_experts"] * ("shared_experts" in taken and "moe" in kinds and not f.model.shared_ffn)


def _dims(f: JobInputs) -> tuple[str, str]:
    sizes = ", ".join(f"{name} = {size}" for name, size in _misaligned(f).items())
    return (
        f"matrix products in {f.job.precision} are slow off multiples of {_multiple(f)}: {sizes}",
        "another tp, cp or etp, or a padded shape",
    )


ADVICE: tuple[Rule[JobInputs], ...] = (
    Rule(
        "approximate",
        lambda f: bool(f.model.approximate),
        lambda f: (f"{f.model.name} is planned approximately: {f.model.approximate}", ""),
    ),
    Rule(
        "tp_domain",
        lambda f: f.tp > f.job.node.nvlink_domain,
        lambda f: (
            f"tp {f.tp} leaves the {f.job.node.nvlink_domain} GPUs that NVLink joins on {f.job.node.name}",
            f"set tp {f.job.node.nvlink_domain}, and pp or cp for the rest",
        ),
    ),
    Rule(
        "bubble",
        lambda f: (f.pp > 1) and f.micro_batches < f.pp,
        lambda f: (
            f"{f.micro_batches} micro-batches do not fill pp {f.pp} stages",
            f"set gbs {f.step * f.pp} or more, or a smaller pp",
        ),
    ),
    Rule("sizes", lambda f: bool(_misaligned(f)), _dims),
    Rule(
        "positions",
        lambda f: 0 < f.model.positions < f.job.seq,
        lambda f: (
            f"seq {f.job.seq} is longer than the {f.model.positions} learned positions",
            f"set seq {f.model.positions}, or let the table grow as NeMo does",
        ),
    ),
    Rule(
        "recompute_idle",
        lambda f: bool(_idle(f)),
        lambda f: (f"recompute_modules {', '.join(_idle(f))}: this model has none", "drop it"),
    ),
    Rule(
        "recompute_hybrid",
        lambda f: f.recompute == 2 and bool(f.model.pattern) and not f.model.approximate,
        lambda f: ("Megatron's Mamba stack recomputes nothing under full recomputation", "set recompute none"),
    ),
    Rule(
        "no_sp",
        lambda f: f.tp > 1 and not f.sp,
        lambda f: (f"tp {f.tp} without sequence parallelism keeps norms' activations whole on every rank", "set sp"),
    ),
)
"""Rules of thumb, for one layout at a time."""
