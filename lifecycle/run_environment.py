"""Variables of the shell that a run began in, for the shell that it is resumed from."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from superpod.node.files import read_json
from superpod.node.redaction import REDACTED
from superpod.node.run_folder import RunFolder

LOGGING = re.compile(r"WANDB_\w+|\w+_OFFLINE")
"""Where a run logs to, and whether it uses the network."""
LOCAL = re.compile(rf"{LOGGING.pattern}|(NVTE|NCCL|NEMO)_\w+")
"""Those too that change kernels and communication; on a cluster the profile and the script have them."""


def missing(folder: RunFolder, kept: re.Pattern[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables of the newest attempt that this shell does not set. Secrets are in no run folder."""
    for attempt in reversed(folder.attempts):
        before = (read_json(attempt.path / "env.json") or {}).get("environment")
        if isinstance(before, dict):
            return {
                name: value
                for name, value in before.items()
                if kept.fullmatch(name) and name not in environ and isinstance(value, str) and REDACTED not in value
            }
    return {}


def restore(folder: RunFolder, kept: re.Pattern[str] = LOCAL) -> None:
    """Set them in this process and name them on stderr."""
    if values := missing(folder, kept):
        shown = " ".join(f"{name}={value}" for name, value in values.items())
        print(f"note: {shown}, as in the run's last attempt; what this shell sets is taken instead", file=sys.stderr)
        os.environ.update(values)


@contextmanager
def restored(folder: RunFolder, kept: re.Pattern[str] = LOGGING) -> Iterator[None]:
    """Have them while its jobs are queued: sbatch hands its environment on."""
    before = dict(os.environ)
    restore(folder, kept)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
