"""What the server can be asked to run: each case is real NeMo.

A case gets its folder and the patches to leave out, returns something JSON can hold, and fails by raising.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import building
import training


@dataclass(frozen=True)
class Case:
    ranks: int
    run: Callable[[Path, frozenset[str]], Any]


TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2_VP2 = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ONE = {f"{kind}_parallel_size": 1 for kind in ("tensor_model", "pipeline_model", "expert_model")} | {
    "virtual_pipeline_model_parallel_size": None,
    "sequence_parallel": False,
}
NORMS = {"recompute_modules": ["layernorm"]}
# One group of queries for each of up to four tensor-parallel ranks.
RESHARDED = partial(training.resumed, source="tp2pp2", num_query_groups=4)
MOE_LORA = partial(training.finetuned, peft="LoRA", source="moe-reference", experts=4, steps=3)
DP_FORMAT = {"ckpt_optim_fully_reshardable": False}

CASES = {
    "reference": Case(1, training.reference),
    "dp-reference": Case(1, partial(training.reference, **DP_FORMAT)),
    "moe-reference": Case(1, partial(training.reference, experts=4)),
    "resume": Case(1, training.resumed),
    "recompute": Case(1, partial(training.resumed, **RECOMPUTE)),
    "dp2": Case(2, partial(training.resumed, source="dp-reference", **DP_FORMAT)),
    "tp2": Case(2, partial(training.resumed, **TP2)),
    "tp2-save": Case(2, partial(training.resumed, save_every=3, **TP2)),
    "tp2-bf16": Case(2, partial(training.resumed, precision="bf16", **TP2)),
    "cp2": Case(2, partial(training.resumed, context_parallel_size=2)),
    # With the overlap callback: Megatron-LM refuses PP 2 x VP without overlapped p2p, NeMo trains it wrongly.
    "pp2vp2": Case(2, partial(training.resumed, overlap=True, **PP2_VP2)),
    "tp2pp2": Case(4, partial(training.reference, num_query_groups=4, pipeline_model_parallel_size=2, **TP2)),
    "to-tp1pp4": Case(4, partial(RESHARDED, pipeline_model_parallel_size=4)),
    "to-tp4pp1": Case(4, partial(RESHARDED, tensor_model_parallel_size=4, sequence_parallel=True)),
    "moe-ep2": Case(2, partial(training.restored, expert_model_parallel_size=2)),
    "moe-tp2ep2": Case(4, partial(training.restored, expert_model_parallel_size=2, **TP2)),
    "finetune": Case(1, training.finetuned),
    "lora": Case(1, partial(training.finetuned, peft="LoRA")),
    "biased-experts": Case(1, partial(training.reference, experts=4, add_bias_linear=True)),
    "moe-lora": Case(1, MOE_LORA),
    "moe-lora-ep2": Case(2, partial(MOE_LORA, expert_model_parallel_size=2)),
    "moe-recompute": Case(1, partial(training.restored, recompute_granularity="selective", **NORMS)),
    "settings": Case(1, building.settings),
    "dry-fp8": Case(1, building.dry_fp8),
    "attention-values": Case(1, building.attention_values),
    "dry-8b": Case(1, partial(building.dry, model="llama3_8b", world_size=1, ranks=[0], context_parallel_size=1)),
    "dry-8b-tp2-pp2": Case(
        1,
        partial(
            building.dry,
            model="llama3_8b",
            world_size=4,
            ranks=[0, 1, 2, 3],
            context_parallel_size=1,
            tensor_model_parallel_size=2,
            pipeline_model_parallel_size=2,
        ),
    ),
    "dry-405b": Case(1, partial(building.dry, model="llama31_405b", world_size=16384, ranks=[0, 8191, 16383])),
    "dry-gemma2": Case(
        1, partial(building.dry, model="gemma2_2b", world_size=1, ranks=[0], tensor_model_parallel_size=1)
    ),
    "dry-deepseek": Case(1, partial(building.dry, model="deepseek_v3", world_size=1024, ranks=[0, 1023])),
    "dry-qwen3-30b": Case(1, partial(building.dry, model="qwen3_30b_a3b", world_size=1, ranks=[0], **ONE)),
    "dry-again": Case(1, building.dry_again),
    "dry-vocabulary": Case(1, building.dry_vocabulary),
    "refuses-gpu": Case(1, building.refuses_gpu),
    "changes": Case(1, building.changes),
}
