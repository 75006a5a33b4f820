"""Environment variables that a profile's `[env]` cannot set: they differ by rank or job, and the launch sets them."""

from __future__ import annotations

import re
from typing import NamedTuple

from superpod.slurm.preflight import inherited

RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "ROLE_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
"""What torchrun sets (torch.distributed.elastic, "Environment Variables"), and rank.py and attempt.py here."""


class Reserved(NamedTuple):
    """Variables whose full name matches a pattern, and why a profile cannot set them."""

    pattern: str
    reason: str


RESERVED = (
    Reserved(
        "|".join(RANK_VARIABLES), "runtime/attempts/attempt.py and runtime/rank/rank.py set it for each job and rank"
    ),
    Reserved(
        r"TORCHELASTIC_\w+|TORCH_ELASTIC_\w+", "torchrun's own; runtime/rank/rank.py sets what Lightning reads of it"
    ),
    Reserved(
        r"CUDA_VISIBLE_DEVICES|NVIDIA_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|(ROCR|HIP)_VISIBLE_DEVICES|ZE_AFFINITY_MASK",
        "Slurm gives each job its GPUs, and LOCAL_RANK chooses among them: gpus_per_node and slurm.gpus",
    ),
    Reserved(
        r"SUPERPOD_(RUN_DIR|ATTEMPT|ATTEMPT_DIR|DEADLINE|SAVE_S|STALLED_S|CAPTURED|LOGS_BY_NODE|NSYS_RANKS|CPU_BIND"
        r"|REHEARSE|REHEARSAL_ENDED|STAGE_FILE)",
        "the launch sets it for each attempt: [chain], slurm.cpu_bind and the options of `recipes submit`",
    ),
    Reserved(
        r"OMPI_COMM_WORLD_\w+|MV2_COMM_WORLD_\w+|PMI_(RANK|SIZE|ID|FD|PORT|JOBID)|PMI2_\w+"
        r"|PMIX_(RANK|NAMESPACE|SERVER_\w+)|JSM_NAMESPACE_\w+|LSB_\w+",
        "another launcher sets it, and frameworks would take their rank from it",
    ),
    Reserved("NCCL_COMM_ID", "every communicator would meet at one address; torch gives each its own"),
    Reserved(
        r"WANDB_RUN_ID|WANDB_RESUME", "every run would write to the same one: runtime/rank/wandb_id.py keeps it per run"
    ),
    Reserved(
        r"NVTE_(FLASH|FUSED|UNFUSED)_ATTN",
        "Megatron sets it and ends where it differs (megatron-core 0.15.3 models/common/language_module/"
        "language_module.py:96): override model.config.attention_backend",
    ),
    Reserved(r"FT_RANK_MONITOR_\w+", "runtime/rank/rank_monitor.py sets it for each rank"),
)


def problem(name: str) -> str:
    """Why a profile's `[env]` cannot set a variable; "" where it can."""
    if inherited.slurm_options({name: ""}):
        return f"{name} is an option of Slurm's commands: [slurm] and slurm.options say what a job is"
    for pattern, reason in RESERVED:
        if re.fullmatch(pattern, name):
            return f"{name} cannot be set: {reason}"
    return ""
