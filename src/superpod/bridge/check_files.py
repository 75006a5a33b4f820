# pyright: reportMissingImports=false
"""Validate exported files with Megatron-Bridge's own code, in its environment and without a GPU.

    PYTHONPATH=src PYTHON_OF_BRIDGE -m superpod.bridge.check_files < files.json

The input is a JSON list of objects with `file` (written by `recipes export --stack bridge`), `hf_config` (a folder with
the model's config.json, so that nothing is downloaded) and `sm` (compute capability of the GPU, such as 90). Prints a
JSON object: file -> error, or null if Megatron-Bridge accepts its configuration.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from superpod.bridge import import_bridge  # noqa: F401 - adds stand-ins for packages that need a GPU


def main() -> None:
    """Validate the files of standard input."""
    requests = json.load(sys.stdin)
    answers = {
        request["file"]: validate(Path(request["file"]), request["hf_config"], request["sm"]) for request in requests
    }
    print(json.dumps(answers))


def validate(file: Path, hf_config: str, sm: int) -> str | None:
    """Build the configuration of a file and let Megatron-Bridge validate it, as at the start of a run.

    Returns:
        Megatron-Bridge's error on one line, or None.
    """
    from megatron.bridge.training.config import runtime_config_update

    with _run_environment(hf_config, sm):
        try:
            module = _load(file)
            _set_world_size(module.WORLD_SIZE)
            config = module.config()
            if config.checkpoint.pretrained_checkpoint:
                Path(config.checkpoint.pretrained_checkpoint).mkdir(parents=True)
            runtime_config_update(config)
        except Exception as error:
            return " ".join(f"{type(error).__name__}: {error}".split())
    return None


def _load(file: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _set_world_size(world_size: int) -> None:
    from megatron.bridge.training import config

    config.get_world_size_safe = lambda: world_size


@contextlib.contextmanager
def _run_environment(hf_config: str, sm: int) -> Iterator[None]:
    """Provide what a run has: a GPU, and the model's config.json.

    The environment variables that the file sets, and the current folder, are restored at the end.
    """
    import torch
    from megatron.bridge import AutoBridge
    from transformers import AutoConfig

    def from_local_config(_path: str, **_options: Any) -> AutoBridge:
        return AutoBridge.from_hf_config(AutoConfig.from_pretrained(hf_config))

    gpu = types.SimpleNamespace(major=sm // 10, minor=sm % 10, name=f"sm{sm}")
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        mock.patch.dict(os.environ),
        mock.patch.object(AutoBridge, "from_hf_pretrained", from_local_config),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=gpu),
    ):
        yield


if __name__ == "__main__":
    main()
