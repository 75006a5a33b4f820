# pyright: reportMissingImports=false
"""Write src/superpod/bridge/stack.json from an installed Megatron-Bridge.

    PYTHONPATH=src PYTHON_OF_BRIDGE scripts/bridge_facts.py

Run it with the Python of an environment that has Megatron-Bridge (docs/bridge.md); it needs no GPU.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json

from superpod.bridge import facts
from superpod.bridge.shipped_recipes import find_recipes


def main() -> None:
    """Write the file."""
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.models.mla_provider import MLAModelProvider
    from megatron.bridge.peft.lora import LoRA
    from megatron.bridge.training import comm_overlap, config
    from megatron.bridge.training.mixed_precision import MixedPrecisionConfig

    classes = {
        "train": config.TrainingConfig,
        "validation": config.ValidationConfig,
        "optimizer": config.OptimizerConfig,
        "scheduler": config.SchedulerConfig,
        "ddp": config.DistributedDataParallelConfig,
        "dist": config.DistributedInitConfig,
        "dataset": config.GPTDatasetConfig,
        "sft_dataset": config.GPTSFTDatasetConfig,
        "logger": config.LoggerConfig,
        "tokenizer": config.TokenizerConfig,
        "checkpoint": config.CheckpointConfig,
        "mixed_precision": MixedPrecisionConfig,
        "comm_overlap": comm_overlap.CommOverlapConfig,
        "peft": LoRA,
    }
    fields = {section: _fields(cls) for section, cls in classes.items()}
    fields["model"] = sorted({*_fields(GPTModelProvider), *_fields(MLAModelProvider)})
    stack = {
        "versions": {name: importlib.metadata.version(name) for name in ("megatron-bridge", "megatron-core")},
        "architectures": AutoBridge.list_supported_models(),
        "userbuffers": [name for name in dir(comm_overlap) if name.startswith("userbuffers")],
        "recipes": list(find_recipes("recipes")),
        "perf_recipes": list(find_recipes("perf_recipes")),
        "fields": fields,
    }
    facts.STACK_FILE.write_text(json.dumps(stack, indent=1) + "\n")
    count = len(stack["recipes"]) + len(stack["perf_recipes"])
    print(f"{facts.STACK_FILE}: {count} recipes, {len(stack['architectures'])} architectures")


def _fields(cls: type) -> list[str]:
    return sorted(f.name for f in dataclasses.fields(cls) if not f.name.startswith("_"))


main()
