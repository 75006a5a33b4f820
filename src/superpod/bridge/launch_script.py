"""Write how to start a recipe on Megatron-Bridge: a batch script for Slurm, and a command for its own launcher."""

from __future__ import annotations

import re
import shlex

from superpod.bridge import facts
from superpod.bridge.translate import BridgeConfig

SCRIPT = """#!/bin/bash
#SBATCH --job-name={job_name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --exclusive
#
# Trains {file} with Megatron-Bridge {version}.
# One task per node starts one process per GPU. Submit the script from the folder of the Python file, with the options
# that your cluster requires:
#
#     sbatch --account=ACCOUNT --partition=PARTITION --time=4:00:00 {script}
#
# To use a container (Pyxis), set SRUN_OPTIONS to --container-image=IMAGE --container-mounts=$PWD
# --container-workdir=$PWD. Every rank reads the model's config.json from Hugging Face: on nodes without a network, set
# HF_MODEL in the Python file to a folder that contains it.
set -euo pipefail

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 --wait=60 ${{SRUN_OPTIONS:-}} \\
    torchrun --nnodes="$SLURM_NNODES" --nproc-per-node={gpus} --rdzv-backend=c10d \\
    --rdzv-endpoint="$head_node:29500" --rdzv-id="$SLURM_JOB_ID" {file}
"""

PRECISION_RECIPES = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "fp8ds": "bf16_with_fp8_delayed_scaling_mixed",
    "fp8cs": "bf16_with_fp8_current_scaling_mixed",
    "fp8bw": "bf16_with_fp8_subchannel_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
}
"""Precision of a recipe -> name of a mixed-precision recipe of Megatron-Bridge."""

COMMAND_SECTIONS = ("model", "train", "validation", "optimizer", "scheduler", "ddp", "comm_overlap")
"""Sections whose fields the command overrides. Data, tokenizer and checkpoints are those of the base recipe."""


def batch_script(config: BridgeConfig, file: str, script: str) -> str:
    """Return a batch script that trains a file written by `recipe_source.render`.

    Args:
        config: the recipe.
        file: name of the Python file.
        script: name of the batch script.
    """
    return SCRIPT.format(
        job_name=file.removesuffix(".py"),
        nodes=config.world_size // config.gpus_per_node,
        gpus=config.gpus_per_node,
        file=file,
        script=script,
        version=facts.version(),
    )


def run_recipe_command(config: BridgeConfig, model: str, gpu: str, precision: str) -> str | None:
    """Return the command that applies the layout to a recipe of Megatron-Bridge by scripts/training/run_recipe.py.

    Args:
        config: the recipe.
        model: name of the model.
        gpu: GPU of the recipe, such as h100.
        precision: precision of the recipe, such as fp8cs.

    Returns:
        The command on one line; None if Megatron-Bridge has no recipe that pretrains this model.
    """
    base = _base_recipe(model, gpu, precision)
    if base is None:
        return None
    overrides = [f"mixed_precision={PRECISION_RECIPES[precision]}", f"dataset.seq_length={config.model['seq_length']}"]
    for section in COMMAND_SECTIONS:
        values = config.model if section == "model" else config.sections[section]
        for name, value in values.items():
            if not str(value).startswith("torch."):
                overrides.append(f"{section}.{name}={_hydra_value(value)}")
    return shlex.join(["python", "scripts/training/run_recipe.py", "--recipe", base, *overrides])


def _base_recipe(model: str, gpu: str, precision: str) -> str | None:
    """Return the most similar recipe of Megatron-Bridge: for this GPU and precision if possible."""
    prefix = re.compile(rf"{re.escape(model)}_pretrain_\d+gpu_(?P<gpu>\w+?)_(?P<rest>\w+)_config")
    matches = [match for match in map(prefix.fullmatch, facts.stack()["recipes"]) if match]
    if not matches:
        return None
    wanted = "fp8mx" if precision == "mxfp8" else precision
    best = min(matches, key=lambda m: (m["gpu"] != gpu, m["rest"] != wanted, len(m.string), m.string))
    return best.string


def _hydra_value(value: object) -> str:
    """Return a value in the syntax of Hydra's overrides, with which Megatron-Bridge parses the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(_hydra_value(item) for item in value)}]"
    return str(getattr(value, "name", value))
