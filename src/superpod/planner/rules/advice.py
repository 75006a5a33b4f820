"""Rules for warnings about layouts that are legal but slow or ineffective, in the form of `rules.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from superpod.planner.layout import MODULES
from superpod.planner.rules.rules import JobInputs, Rule

if TYPE_CHECKING:
    from superpod.planner.arrays import Integer

REQUIRED_BLOCKS = {"moe": "moe", "shared_experts": "moe", "mlp": "mlp"}
"""Module that can be recomputed in any model -> kind of block without which this has no effect."""


def _gemm_sizes(f: JobInputs) -> dict[str, Integer]:
    """Return name -> size in elements of each dimension of a rank's GEMMs; indivisible sizes are omitted."""
    m = f.model
    sizes: dict[str, tuple[Integer, Integer]] = {"hidden": (m.hidden, 1), "vocab / tp": (m.padded_vocab(f.tp), f.tp)}
    sizes |= {"head_dim": (m.channels, 1)} if "attention" in m.kinds else {}
    sizes |= {"ffn / tp": (m.ffn, f.tp)} if "mlp" in m.kinds else {}
    sizes |= {"expert_ffn / etp": (m.expert_ffn, f.etp)} if "moe" in m.kinds else {}
    sizes |= {"tokens of a rank": (f.job.seq * f.mbs, f.cp * (f.tp if f.sp else 1))}
    return {name: size // by for name, (size, by) in sizes.items() if size and size % by == 0}


def _required_multiple(f: JobInputs) -> int:
    """Return the number of elements to which Tensor Cores need GEMM sizes aligned: 16 bytes, in FP8 and FP4 16."""
    return {"fp32": 1, "tf32": 4, "bf16": 8, "fp16": 8}.get(f.job.precision, 16)


def _misaligned_sizes(f: JobInputs) -> dict[str, Integer]:
    """Return the GEMM sizes that slow down Tensor Cores."""
    return {name: size for name, size in _gemm_sizes(f).items() if size % _required_multiple(f)}


def _absent_modules(f: JobInputs) -> list[str]:
    """Return the modules that the layout recomputes but the model does not have."""
    recomputed = [name for name in REQUIRED_BLOCKS if f.modules >> MODULES.index(name) & 1]
    absent_modules = [name for name in recomputed if REQUIRED_BLOCKS[name] not in f.model.kinds]
    if "shared_experts" in recomputed and "moe" in f.model.kinds and not f.model.shared_ffn:
        absent_modules.append("shared_experts")
    return absent_modules


def _explain_misaligned(f: JobInputs) -> tuple[str, str]:
    sizes = ", ".join(f"{name} = {size}" for name, size in _misaligned_sizes(f).items())
    return (
        f"GEMMs in {f.job.precision} are slow if a dimension is not a multiple of {_required_multiple(f)}: {sizes}",
        "change tp, cp or etp, or pad the model's sizes",
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
            f"tp {f.tp} exceeds the NVLink domain of {f.job.node.name}, {f.job.node.nvlink_domain} GPUs",
            f"set tp {f.job.node.nvlink_domain}, and increase pp or cp instead",
        ),
    ),
    Rule(
        "bubble",
        lambda f: (f.pp > 1) and f.micro_batches < f.pp,
        lambda f: (
            f"{f.micro_batches} micro-batches do not fill the {f.pp} stages of the pipeline",
            f"set gbs to {f.step * f.pp} or more, or reduce pp",
        ),
    ),
    Rule("sizes", lambda f: bool(_misaligned_sizes(f)), _explain_misaligned),
    Rule(
        "positions",
        lambda f: 0 < f.model.positions < f.job.seq,
        lambda f: (
            f"seq {f.job.seq} exceeds the {f.model.positions} learned position embeddings",
            f"set seq {f.model.positions}, or enlarge the position embedding as NeMo does",
        ),
    ),
    Rule(
        "recompute_idle",
        lambda f: bool(_absent_modules(f)),
        lambda f: (
            f"recompute_modules {', '.join(_absent_modules(f))} has no effect: the model has no such module",
            "remove it from recompute_modules",
        ),
    ),
    Rule(
        "recompute_hybrid",
        lambda f: f.recompute == 2 and bool(f.model.pattern) and not f.model.approximate,
        lambda f: ("full recomputation has no effect in Megatron's Mamba stack", "set recompute none"),
    ),
    Rule(
        "no_sp",
        lambda f: f.tp > 1 and not f.sp,
        lambda f: (
            f"tp {f.tp} without sequence parallelism replicates the activations of norms on every rank",
            "set sp",
        ),
    ),
)
"""Rules that produce warnings, for one layout at a time."""
