"""Write a `BridgeConfig` as a Python file that trains with Megatron-Bridge and needs nothing else."""

from __future__ import annotations

import enum
import json
import textwrap
from collections.abc import Mapping

from superpod.bridge import facts
from superpod.bridge.translate import BridgeConfig

SECTION_CLASSES = {
    "train": "TrainingConfig",
    "validation": "ValidationConfig",
    "optimizer": "OptimizerConfig",
    "scheduler": "SchedulerConfig",
    "ddp": "DistributedDataParallelConfig",
    "dist": "DistributedInitConfig",
    "dataset": "GPTDatasetConfig",
    "sft_dataset": "GPTSFTDatasetConfig",
    "logger": "LoggerConfig",
    "tokenizer": "TokenizerConfig",
    "checkpoint": "CheckpointConfig",
    "mixed_precision": "MixedPrecisionConfig",
    "comm_overlap": "CommOverlapConfig",
}
"""Section -> its class. All are in `training.config`, except those of `OTHER_MODULES`."""

OTHER_MODULES = {"mixed_precision": "training.mixed_precision", "comm_overlap": "training.comm_overlap"}

FILE = '''"""{heading}"""

import os
import sys

# Environment variables of the run, set before CUDA, NCCL, PyTorch and Transformer Engine read them.
# Variables that are already set keep their values.
ENVIRONMENT = {environment}
os.environ.update(ENVIRONMENT | os.environ)

{imports}

HF_MODEL = {hf_model}  # Hugging Face ID, or a folder with config.json
WORLD_SIZE = {world_size}  # number of GPUs for which the layout was chosen


def model():
    """Return the model provider: the architecture of HF_MODEL, and how it is parallelized and executed."""
    provider = AutoBridge.from_hf_pretrained(HF_MODEL).to_megatron_provider(load_weights=False)
{model}
    return provider


def config() -> ConfigContainer:
    """Return the complete configuration."""
    return ConfigContainer(
        model=model(),
{sections}
        env_vars=ENVIRONMENT,
    )


def main() -> None:
    """Train as a process of torchrun."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != WORLD_SIZE:
        sys.exit(f"this recipe needs {{WORLD_SIZE}} processes, one per GPU; started with {{world_size}}")
    {train}(config(), forward_step)


if __name__ == "__main__":
    main()
'''


def render(
    config: BridgeConfig, title: str, about: str, command: str, file: str, environment: Mapping[str, str]
) -> str:
    """Return the text of the Python file.

    Args:
        config: the recipe.
        title: first line of the file, such as the recipe's name.
        about: what the recipe trains, and on which GPUs.
        command: the command that writes the file.
        file: name of the file.
        environment: environment variables of the ranks.
    """
    nodes = config.world_size // config.gpus_per_node
    paragraphs = [title, textwrap.fill(about, 100), f"    {command}"]
    if config.not_translated:
        lines = [textwrap.fill(f"- {line}", 100, subsequent_indent="  ") for line in config.not_translated]
        paragraphs.append("\n".join(["Not translated:", *lines]))
    if nodes == 1:
        paragraphs.append(f"    torchrun --nproc-per-node {config.gpus_per_node} {file}")
    heading = "\n\n".join(paragraphs) + "\n"
    return FILE.format(
        heading=heading.replace("\\", "\\\\").replace('"""', "'''"),
        environment=_dictionary(environment),
        imports=_imports(config),
        hf_model=source(config.hf_model),
        world_size=config.world_size,
        model="\n".join(f"    provider.{name} = {source(value)}" for name, value in config.model.items()),
        sections="\n".join(_sections(config)),
        train="pretrain" if config.is_pretraining else "finetune",
    )


def source(value: object) -> str:
    """Return a value as Python source.

    Raises:
        TypeError: the value is an object of a class that the file does not import.
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if str(value).startswith("torch."):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(source(item) for item in value)}]"
    if isinstance(value, tuple):
        return f"({', '.join(source(item) for item in value)},)"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if value is None or isinstance(value, bool | int | float | dict):
        return repr(value)
    raise TypeError(f"{type(value).__name__} cannot be written to the file")


def _imports(config: BridgeConfig) -> str:
    package = facts.PACKAGE
    modules: dict[str, list[str]] = {f"{package}.training.config": ["ConfigContainer"]}
    for section in config.sections:
        module = f"{package}.{OTHER_MODULES.get(section, 'training.config')}"
        modules.setdefault(module, []).append(SECTION_CLASSES[section])
    if config.userbuffers:
        modules[f"{package}.training.comm_overlap"].append(config.userbuffers)
    train = "pretrain" if config.is_pretraining else "finetune"
    modules |= {package: ["AutoBridge"], f"{package}.training.{train}": [train]}
    modules[f"{package}.training.gpt_step"] = ["forward_step"]
    if config.peft:
        name = config.peft[0]
        modules[f"{package}.peft.{name.lower()}"] = [name]
    enums = [value for value in config.model.values() if isinstance(value, enum.Enum)]
    for value in enums:
        modules.setdefault(type(value).__module__, []).append(type(value).__name__)
    lines = ["import torch"]
    for module, names in sorted(modules.items()):
        line = f"from {module} import {', '.join(sorted(names))}"
        if len(line) > 100:
            names_lines = "".join(f"    {name},\n" for name in sorted(names))
            line = f"from {module} import (\n{names_lines})"
        lines.append(line)
    return "\n".join(lines)


def _sections(config: BridgeConfig) -> list[str]:
    lines = []
    for section, values in config.sections.items():
        parameter = "dataset" if section == "sft_dataset" else section
        arguments = {name: source(value) for name, value in values.items()}
        if section == "comm_overlap" and config.userbuffers:
            arguments["tp_comm_overlap_cfg"] = config.userbuffers
        lines += _call(parameter, SECTION_CLASSES[section], arguments)
    if config.peft:
        name, values = config.peft
        lines += _call("peft", name, {key: source(value) for key, value in values.items()})
    return lines


def _call(parameter: str, name: str, arguments: Mapping[str, str]) -> list[str]:
    inner = [f"            {key}={value}," for key, value in arguments.items()]
    return [f"        {parameter}={name}(", *inner, "        ),"]


def _dictionary(values: Mapping[str, str]) -> str:
    return "\n".join(["{", *(f"    {source(name)}: {source(value)}," for name, value in values.items()), "}"])
