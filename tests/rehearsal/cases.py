"""The cases that the server runs, all with real NeMo.

A case gets its folder and the patches to leave out. It returns JSON data, and fails by raising.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import build_cases
import training_cases

from superpod.rehearsal.options import option_cases


@dataclass(frozen=True)
class NemoCase:
    """A function that runs in `ranks` forked processes at once."""

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
RESHARDED = partial(training_cases.resumed, source="tp2pp2", num_query_groups=4)
MOE_LORA = partial(training_cases.finetuned, peft="LoRA", source="moe-reference", experts=4, steps=3)
DP_FORMAT = {"ckpt_optim_fully_reshardable": False}

CASES = {
    "reference": NemoCase(1, training_cases.reference),
    "dp-reference": NemoCase(1, partial(training_cases.reference, **DP_FORMAT)),
    "moe-reference": NemoCase(1, partial(training_cases.reference, experts=4)),
    "resume": NemoCase(1, training_cases.resumed),
    "recompute": NemoCase(1, partial(training_cases.resumed, **RECOMPUTE)),
    "dp2": NemoCase(2, partial(training_cases.resumed, source="dp-reference", **DP_FORMAT)),
    "tp2": NemoCase(2, partial(training_cases.resumed, **TP2)),
    "tp2-save": NemoCase(2, partial(training_cases.resumed, save_every=3, **TP2)),
    "tp2-bf16": NemoCase(2, partial(training_cases.resumed, precision="bf16", **TP2)),
    "fsdp-dp2": NemoCase(2, training_cases.sharded),
    "offload-bf16": NemoCase(1, partial(training_cases.with_option, option="offload_optimizer")),
    "precise-bf16": NemoCase(1, partial(training_cases.with_option, option="precision_aware")),
    "cp2": NemoCase(2, partial(training_cases.resumed, context_parallel_size=2)),
    # With the overlap callback: Megatron-LM refuses PP 2 x VP without overlapped p2p, NeMo trains it wrongly.
    "pp2vp2": NemoCase(2, partial(training_cases.resumed, overlap=True, **PP2_VP2)),
    "tp2pp2": NemoCase(4, partial(training_cases.reference, num_query_groups=4, pipeline_model_parallel_size=2, **TP2)),
    "to-tp1pp4": NemoCase(4, partial(RESHARDED, pipeline_model_parallel_size=4)),
    "to-tp4pp1": NemoCase(4, partial(RESHARDED, tensor_model_parallel_size=4, sequence_parallel=True)),
    "moe-ep2": NemoCase(2, partial(training_cases.restored, expert_model_parallel_size=2)),
    "moe-tp2ep2": NemoCase(4, partial(training_cases.restored, expert_model_parallel_size=2, **TP2)),
    "finetune": NemoCase(1, training_cases.finetuned),
    "lora": NemoCase(1, partial(training_cases.finetuned, peft="LoRA")),
    "biased-experts": NemoCase(1, partial(training_cases.reference, experts=4, add_bias_linear=True)),
    "moe-lora": NemoCase(1, MOE_LORA),
    "moe-lora-ep2": NemoCase(2, partial(MOE_LORA, expert_model_parallel_size=2)),
    "moe-recompute": NemoCase(1, partial(training_cases.restored, recompute_granularity="selective", **NORMS)),
    "settings": NemoCase(1, build_cases.settings),
    "dry-fp8": NemoCase(1, build_cases.dry_fp8),
    "dry-step": NemoCase(1, build_cases.dry_step),
    "attention-values": NemoCase(1, build_cases.attention_values),
    "dry-8b": NemoCase(
        1, partial(build_cases.dry, model="llama3_8b", world_size=1, ranks=[0], context_parallel_size=1)
    ),
    "dry-8b-tp2-pp2": NemoCase(
        1,
        partial(
            build_cases.dry,
            model="llama3_8b",
            world_size=4,
            ranks=[0, 1, 2, 3],
            context_parallel_size=1,
            tensor_model_parallel_size=2,
            pipeline_model_parallel_size=2,
        ),
    ),
    "dry-405b": NemoCase(1, partial(build_cases.dry, model="llama31_405b", world_size=16384, ranks=[0, 8191, 16383])),
    "dry-gemma2": NemoCase(
        1, partial(build_cases.dry, model="gemma2_2b", world_size=1, ranks=[0], tensor_model_parallel_size=1)
    ),
    "dry-deepseek": NemoCase(1, partial(build_cases.dry, model="deepseek_v3", world_size=1024, ranks=[0, 1023])),
    "dry-qwen3-30b": NemoCase(1, partial(build_cases.dry, model="qwen3_30b_a3b", world_size=1, ranks=[0], **ONE)),
    "dry-twice": NemoCase(1, build_cases.dry_twice),
    "dry-vocabulary": NemoCase(1, build_cases.dry_vocabulary),
    "refuses-gpu": NemoCase(1, build_cases.refuses_gpu),
    "changes": NemoCase(1, build_cases.changes),
    **{f"options-{name}": NemoCase(1, partial(build_cases.options, precisions=(name,))) for name in option_cases.GPUS},
}
