"""Configure NeMo's profiling callbacks.

The callbacks of NeMo 2.7.3 count completed steps: to profile from step 10 on, start at 9.
"""

from __future__ import annotations

import nemo_run as run
from nemo.lightning.pytorch.callbacks import NsysCallback, PytorchProfilerCallback


def torch_profiler(first: int, last: int) -> run.Config:
    """Return a callback that runs PyTorch's profiler in steps `first` to `last`; profiled.py sets ranks and folder.

    `active_steps` covers all steps, because the profiler overwrites its trace after `active_steps` steps.
    """
    return run.Config(PytorchProfilerCallback, start_step=first - 1, end_step=last, active_steps=last - first + 1)


def nsys(first: int, last: int, ranks: tuple[int, ...]) -> run.Config:
    """Return a callback that starts and stops `nsys profile --capture-range=cudaProfilerApi` on `ranks`."""
    return run.Config(NsysCallback, start_step=first - 1, end_step=last, ranks=list(ranks))
