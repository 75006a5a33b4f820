"""Entry points of a rehearsed run. Importing this module installs the patches.

``rehearse`` replaces ``llm.pretrain`` and similar functions by these, so that nemo_run's runner imports this module in
every torchrun child when it reads the recipe. NeMo may have been imported before, because the file refers to NeMo's
classes first. No environment variable or start-up hook is needed.
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


def _wrap(real: Callable[P, T]) -> Callable[P, T]:
    """Return a function of this module that prepares the process for CPUs and calls NeMo's function `real`."""

    @functools.wraps(real)
    def entry(*args: P.args, **kwargs: P.kwargs) -> T:
        import torch

        if torch.cuda.is_available():
            raise RehearsalError(
                "a rehearsal runs without a GPU, but torch detects one", hint="set CUDA_VISIBLE_DEVICES=''"
            )
        # With more threads than cores, the ranks would wait for each other.
        torch.set_num_threads(cpu_threads.threads_per_rank(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        try:
            return real(*args, **kwargs)
        finally:
            if os.environ.get("RANK", "0") == "0":
                settings = ", ".join(f"{name}={value}" for name, value in sorted(dropped.items()))
                print(f"rehearsal: GPU-only settings switched off: {settings or 'none'}", flush=True)

    entry.__module__ = __name__  # otherwise nemo_run would serialize NeMo's function, whose name wraps() has copied
    entry.__qualname__ = real.__name__
    return entry


pretrain = _wrap(api.pretrain)
finetune = _wrap(api.finetune)
distill = _wrap(api.distill)
prune = _wrap(pruning.patch_for_cpus()(api.prune))
