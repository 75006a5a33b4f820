"""Entry points of a rehearsed run. Importing this module installs the patches.

``rehearse`` puts these functions in place of ``llm.pretrain`` and ``llm.finetune``, so nemo_run's runner
imports this module in every torchrun child when it reads the recipe: after NeMo, whose classes come earlier in
the file. No environment variable and no start-up hook is needed.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

from superpod.rehearsal.registry import install

install()

from nemo.collections.llm import api  # noqa: E402 - Megatron reads torch.cuda while it is imported

from superpod.rehearsal.convert import RehearsalError  # noqa: E402
from superpod.rehearsal.settings import dropped  # noqa: E402


def _rehearsed(real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def entry(*args: Any, **kwargs: Any) -> Any:
        _refuse_gpu()
        _share_cores()
        try:
            return real(*args, **kwargs)
        finally:
            _say_what_was_dropped()

    entry.__module__ = __name__  # wraps() copied NeMo's: the recipe would name NeMo's function
    entry.__qualname__ = real.__name__
    return entry


def _say_what_was_dropped() -> None:
    if os.environ.get("RANK", "0") == "0":
        listed = ", ".join(f"{name}={value}" for name, value in sorted(dropped.items()))
        print(f"rehearsal: GPU-only settings switched off: {listed or 'none'}", flush=True)


def _refuse_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        raise RehearsalError("a rehearsal runs without a GPU, but torch sees one", hint="set CUDA_VISIBLE_DEVICES=''")


def _share_cores() -> None:
    """One process's share of this machine's cores: more threads than cores make gloo's ranks wait for each other."""
    import torch

    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))


pretrain = _rehearsed(api.pretrain)
finetune = _rehearsed(api.finetune)
