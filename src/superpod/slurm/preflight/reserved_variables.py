"""Environment variables that `[env]` of a profile cannot set, because the job sets them for each rank or attempt."""

from __future__ import annotations

import re
from typing import NamedTuple

from superpod.slurm.preflight import inherited

RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "ROLE_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
"""Variables that torchrun sets (torch.distributed.elastic, "Environment Variables"); here attempt.py and rank.py."""


class Reserved(NamedTuple):
    """Variables that a profile cannot set."""

    pattern: str
    """regular expression that matches complete names"""
    reason: str


RESERVED = (
    Reserved("|".join(RANK_VARIABLES), "runtime/attempts/attempt.py and runtime/rank/rank.py set it for each rank"),
    Reserved(
        r"TORCHELASTIC_\w+|TORCH_ELASTIC_\w+",
        "they belong to torchrun; runtime/rank/rank.py sets those that Lightning reads",
    ),
    Reserved(
        r"CUDA_VISIBLE_DEVICES|NVIDIA_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|(ROCR|HIP)_VISIBLE_DEVICES|ZE_AFFINITY_MASK",
        "Slurm assigns GPUs to the job, and LOCAL_RANK selects one; use gpus_per_node and slurm.gpus",
    ),
    Reserved(
        r"SUPERPOD_(RUN_DIR|ATTEMPT|ATTEMPT_DIR|DEADLINE|SAVE_S|STALLED_S|CAPTURED|LOGS_BY_NODE|NSYS_RANKS|CPU_BIND"
        r"|REHEARSE|REHEARSAL_ENDED|STAGE_FILE)",
        "it is set for each attempt; use [chain], slurm.cpu_bind or the options of `recipes submit`",
    ),
    Reserved(
        r"OMPI_COMM_WORLD_\w+|MV2_COMM_WORLD_\w+|PMI_(RANK|SIZE|ID|FD|PORT|JOBID)|PMI2_\w+"
        r"|PMIX_(RANK|NAMESPACE|SERVER_\w+)|JSM_NAMESPACE_\w+|LSB_\w+",
        "it belongs to a different launcher, and frameworks would read their rank from it",
    ),
    Reserved("NCCL_COMM_ID", "all communicators would use the same address; torch assigns one to each"),
    Reserved(
        r"WANDB_RUN_ID|WANDB_RESUME",
        "all runs would write to the same W&B run; runtime/rank/wandb_id.py keeps one id per run",
    ),
    Reserved(
        r"NVTE_(FLASH|FUSED|UNFUSED)_ATTN",
        "Megatron sets it and fails if the environment differs (megatron-core 0.15.3 models/common/language_module/"
        "language_module.py:96); override model.config.attention_backend",
    ),
    Reserved(r"FT_RANK_MONITOR_\w+", "runtime/rank/rank_monitor.py sets it for each rank"),
)


def problem(name: str) -> str:
    """Return an error message if `[env]` of a profile cannot set a variable; "" if it can."""
    if inherited.slurm_options({name: ""}):
        return f"{name} is an option of Slurm's commands; use [slurm] and slurm.options"
    for pattern, reason in RESERVED:
        if re.fullmatch(pattern, name):
            return f"{name} cannot be set: {reason}"
    return ""
