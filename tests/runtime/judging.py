"""What tests of verdicts on logs share."""

from superpod.diagnosis.verdict import Finding

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB. GPU 3 has a total capacity of 79.11 GiB "
    "of which 1.85 GiB is free.\n"
)
TRACEBACK = 'Traceback (most recent call last):\n  File "/home/u/train.py", line 31, in <module>\n    main()\n'
STEPS = [f" iteration {i:8d}/     100 | lm loss: {8 - i / 25:.4E} | grad norm: 1.2 |\n" for i in range(1, 101)]


def root_of(verdict) -> Finding:
    """The root of a verdict that names one."""
    assert verdict.root
    return verdict.root


def named(verdict):
    return root_of(verdict).name if verdict.root else verdict.state
