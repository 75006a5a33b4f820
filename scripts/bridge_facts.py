# pyright: reportMissingImports=false
"""Write src/superpod/bridge/stack.json from an installed Megatron-Bridge.

    PYTHONPATH=src PYTHON_OF_BRIDGE scripts/bridge_facts.py

Run it with the Python of an environment that has Megatron-Bridge (docs/bridge.md); it needs no GPU.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
import json
import pkgutil

from superpod.bridge import facts, import_bridge  # noqa: F401 - import_bridge adds stand-ins for missing packages


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
        "recipes": _recipe_names("recipes"),
        "perf_recipes": _recipe_names("perf_recipes"),
        "fields": fields,
    }
    facts.STACK_FILE.write_text(json.dumps(stack, indent=1) + "\n")
    count = len(stack["recipes"]) + len(stack["perf_recipes"])
    print(f"{facts.STACK_FILE}: {count} recipes, {len(stack['architectures'])} architectures")


def _fields(cls: type) -> list[str]:
    return sorted(f.name for f in dataclasses.fields(cls) if not f.name.startswith("_"))


def _recipe_names(folder: str) -> list[str]:
    """Return the names of the functions that a package of Megatron-Bridge defines and that return a recipe."""
    names = set()
    package = importlib.import_module(f"{facts.PACKAGE}.{folder}")
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(found.name)
        names |= {name for name, value in vars(module).items() if _is_recipe(name, value, folder)}
    return sorted(names)


def _is_recipe(name: str, value: object, folder: str) -> bool:
    """Return whether `value` is defined in `folder` and can be called without arguments, like every recipe."""
    if not name.endswith("_config") or name.startswith("_") or not inspect.isfunction(value):
        return False
    if not value.__module__.startswith(f"{facts.PACKAGE}.{folder}."):
        return False
    parameters = inspect.signature(value).parameters.values()
    return "gpu_" in name and all(
        p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters
    )


main()
