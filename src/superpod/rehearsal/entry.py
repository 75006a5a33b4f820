"""Entry points of a rehearsed run. Importing this module installs the patches.

``rehearse`` puts these functions in place of ``llm.pretrain`` and its like, so nemo_run's runner
imports this module in every torchrun child when it reads the recipe. NeMo is imported before that, because the file
names its classes first. No environment variable and no start-up hook is needed.
"""

import functools
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from superpod.rehearsal.patches.registry import install

install()

from nemo.collections.llm import api  # noqa: E402 - Megatron reads torch.cuda while it is imported

from superpod.common import cpu_threads  # noqa: E402
from superpod.rehearsal import pruning  # noqa: E402
from superpod.rehearsal.errors import RehearsalError  # noqa: E402
from superpod.rehearsal.patches.gpu_settings import dropped  # noqa: E402

P = ParamSpec("P")
T = TypeVar("T")


def _rehearsed(real: Callable[P, T]) -> Callable[P, T]:
    @functools.wraps(real)
    def entry(*args: P.args, **kwargs: P.kwargs) -> T:
        _refuse_gpu()
        _share_cores()
        try:
            return real(*args, **kwargs)
        finally:
            _print_dropped()

    entry.__module__ = __name__  # with NeMo's name, which wraps() copied, nemo_run would write NeMo's function
    entry.__qualname__ = real.__name__
    return entry


def _print_dropped() -> None:
    if os.environ.get("RANK", "0") == "0":
        listed = ", ".join(f"{name}={value}" for name, value in sorted(dropped.items()))
        print(f"rehearsal: GPU-only settings switched off: {listed or 'none'}", flush=True)


def _refuse_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        raise RehearsalError("a rehearsal runs without a GPU, but torch sees one", hint="set CUDA_VISIBLE_DEVICES=''")


def _share_cores() -> None:
    """Take one rank's share of the cores: with more threads than cores, gloo's ranks wait for each other."""
    import torch

    torch.set_num_threads(cpu_threads.threads_per_rank(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


pretrain = _rehearsed(api.pretrain)
finetune = _rehearsed(api.finetune)
distill = _rehearsed(api.distill)
prune = _rehearsed(pruning.on_cpus()(api.prune))
