"""NeMo's own callbacks that profile steps of a run; they count the steps that are done: step 10 begins at 9 (2.7.3)."""

from __future__ import annotations

import nemo_run as run
from nemo.lightning.pytorch.callbacks import NsysCallback, PytorchProfilerCallback


def torch_profiler(first: int, last: int) -> run.Config:
    """PyTorch's profiler for steps `first` to `last`; a run gives it its ranks and its folder (profiled.py).

    A trace begins anew, in the same file, after `active_steps`: they are all of them.
    """
    return run.Config(PytorchProfilerCallback, start_step=first - 1, end_step=last, active_steps=last - first + 1)


def nsys(first: int, last: int, ranks: tuple[int, ...]) -> run.Config:
    """The range that `nsys profile --capture-range=cudaProfilerApi` records on these ranks."""
    return run.Config(NsysCallback, start_step=first - 1, end_step=last, ranks=list(ranks))
