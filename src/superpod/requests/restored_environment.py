"""Restore the environment variables of a run's latest attempt when the run is resumed in a different shell."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from superpod.common.json_files import read_json
from superpod.common.redaction import REDACTED
from superpod.runtime.runs.run_folder import RunFolder

LOGGING = re.compile(r"WANDB_\w+|\w+_OFFLINE")
"""Names of variables that determine where a run logs and whether it uses the network."""
LOCAL = re.compile(rf"{LOGGING.pattern}|(NVTE|NCCL|NEMO)_\w+")
"""LOGGING, and names of variables for kernels and communication, which the profile and the script set on a cluster."""


def missing_variables(
    folder: RunFolder, pattern: re.Pattern[str], environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return name -> value of the latest attempt's variables that match `pattern` and are not set in `environ`.

    Values of secrets are not stored, so these are missing.
    """
    for attempt in reversed(folder.attempts):
        recorded_environment = (read_json(attempt.path / "env.json") or {}).get("environment")
        if isinstance(recorded_environment, dict):
            return {
                name: value
                for name, value in recorded_environment.items()
                if pattern.fullmatch(name) and name not in environ and isinstance(value, str) and REDACTED not in value
            }
    return {}


def restore_variables(folder: RunFolder, pattern: re.Pattern[str] = LOCAL) -> None:
    """Set the variables of `missing_variables` in this process, and print them on stderr."""
    values = missing_variables(folder, pattern)
    if values:
        variables_text = " ".join(f"{name}={value}" for name, value in values.items())
        print(
            f"note: restored from the run's latest attempt: {variables_text}; to change a variable, set it in this "
            "shell",
            file=sys.stderr,
        )
        os.environ.update(values)


@contextmanager
def restored_variables(folder: RunFolder, pattern: re.Pattern[str] = LOGGING) -> Iterator[None]:
    """Set the variables of `missing_variables` within the block, in which jobs are submitted that inherit them."""
    old_environ = dict(os.environ)
    restore_variables(folder, pattern)
    try:
        yield
    finally:
        for name in os.environ.keys() - old_environ.keys():
            del os.environ[name]
