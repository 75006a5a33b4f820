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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from superpod.bridge import import_bridge  # noqa: F401 - adds stand-ins for packages that need a GPU


def main() -> None:
    """Validate the files of standard input."""
    requests = json.load(sys.stdin)
    answers = {
        request["file"]: validate_file(Path(request["file"]), request["hf_config"], request["sm"])
        for request in requests
    }
    print(json.dumps(answers))


def validate_file(file: Path, hf_config: str, sm: int) -> str | None:
    """Build the configuration of a file and validate it; return the error as in `validate`."""
    with run_environment(lambda _hf_model: hf_config, sm):
        try:
            module = _load(file)
            config = module.config()
        except Exception as error:
            return describe(error)
        if config.checkpoint.pretrained_checkpoint:
            Path(config.checkpoint.pretrained_checkpoint).mkdir(parents=True)
        return validate(config, module.WORLD_SIZE)


def validate(config: Any, world_size: int) -> str | None:
    """Let Megatron-Bridge validate a `ConfigContainer` as at the start of a run with this number of GPUs.

    Returns:
        Megatron-Bridge's error on one line, or None.
    """
    from megatron.bridge.training import config as bridge_config

    with mock.patch.object(bridge_config, "get_world_size_safe", return_value=world_size):
        try:
            bridge_config.runtime_config_update(config)
        except Exception as error:
            return describe(error)
    return None


def describe(error: Exception) -> str:
    """Return the class and the message of an error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _load(file: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def run_environment(find_hf_config: Callable[[str], str], sm: int, gpu: str = "") -> Iterator[None]:
    """Provide what a run has: a GPU, and the config.json of a model instead of its download.

    Environment variables that a recipe sets, and the current folder (a temporary one), are restored at the end.

    Args:
        find_hf_config: function that returns the folder with the config.json of a Hugging Face ID.
        sm: compute capability of the GPU, such as 90.
        gpu: name that CUDA reports for it, such as "NVIDIA B200".
    """
    import torch
    from megatron.bridge import AutoBridge
    from transformers import AutoConfig

    def from_local_config(hf_model: object, **_options: Any) -> AutoBridge:
        return AutoBridge.from_hf_config(AutoConfig.from_pretrained(find_hf_config(str(hf_model))))

    properties = types.SimpleNamespace(major=sm // 10, minor=sm % 10, name=gpu)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        mock.patch.dict(os.environ),
        mock.patch.object(AutoBridge, "from_hf_pretrained", from_local_config),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
    ):
        yield


if __name__ == "__main__":
    main()
