"""Parameters of LoRA adapters on each rank. Source: nemo/collections/llm/peft/lora.py."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from superpod.planner.arrays import Array
from superpod.planner.memory.units import MemoryUnits
from superpod.planner.models import ModelShape


@dataclass(frozen=True)
class Adapters:
    """Number of trainable parameters on each pipeline rank."""

    dense: Array
    experts: Array


def adapters(u: MemoryUnits) -> Adapters:
    """Count the parameters of LoRA: in x r and r x out per target, one of them sharded over tp.

    The routed experts of a rank share one adapter, which counts as dense.
    """
    m, rank, targets = u.job.model, u.job.options.lora_rank, u.job.options.lora_targets
    sizes: dict[str, dict[str, tuple[int, int]]] = {
        "attention": _attention_targets(m),
        "mla": _mla_targets(m),
        "mlp": {"linear_fc1": (m.hidden, m.ffn * (1 + m.gated)), "linear_fc2": (m.ffn, m.hidden)},
        "moe": {"linear_fc1": (m.hidden, m.expert_ffn * (1 + m.gated)), "linear_fc2": (m.expert_ffn, m.hidden)},
        "mamba": {"linear_fc1": (m.hidden, 0)},
        "delta": {"linear_fc1": (m.hidden, 0)},
    }
    dense = np.zeros(u.c.rank.shape)
    for kind, blocks in u.c.blocks.items():
        width = sum(sum(pair) for name, pair in sizes[kind].items() if name in targets)
        dense = dense + blocks * (width * rank * u.over_tp)
    return Adapters(dense=dense, experts=0.0 * dense)


def _attention_targets(m: ModelShape) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of each linear layer of attention that can have an adapter."""
    q, kv = m.heads * m.channels, m.groups * m.channels
    return {"linear_qkv": (m.hidden, q + 2 * kv), "linear_proj": (q, m.hidden)}


def _mla_targets(m: ModelShape) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of each linear layer of latent attention that can have an adapter."""
    qk = m.heads * (m.qk_nope_dim + m.qk_rope_dim)
    queries = {"linear_q_down_proj": (m.hidden, m.q_lora), "linear_q_up_proj": (m.q_lora, qk)}
    return {
        **(queries if m.q_lora else {"linear_q_proj": (m.hidden, qk)}),
        "linear_kv_down_proj": (m.hidden, m.kv_lora + m.qk_rope_dim),
        "linear_kv_up_proj": (m.kv_lora, m.heads * (m.qk_nope_dim + m.v_dim)),
        "linear_proj": (m.heads * m.v_dim, m.hidden),
    }
