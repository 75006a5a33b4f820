"""The JSON record that each rank of a rehearsal writes when its training ends; `recorder.py` fills it."""

from typing import TypedDict

MicroBatch = list[list[list[int]]]
"""[tokens, positions] of a micro-batch; both have the shape [samples][tokens of this rank]."""
Digest = tuple[str, bool, bool, bool]
"""(hash of a parameter's bits; whether tensor parallelism shards it; whether it belongs to an expert; whether it is an
embedding that the first and last stage share)."""


class RankRecord(TypedDict):
    """The record of one rank. Times are Unix times in seconds."""

    losses: list[float]
    grad_norms: list[float]
    """Gradient norms before clipping; empty if the optimizer reports none."""
    built: float
    """Time at which NeMo's objects were created."""
    started: float
    """Time at which the weights were loaded."""
    step_ends: list[float]
    first_step: int
    """Number of completed steps when training started: 0, or that of the checkpoint."""
    layers: list[int]
    """Numbers of this rank's decoder layers, from 1."""
    inputs: list[list[MicroBatch]]
    """The input micro-batches of the first steps; empty except on the first stage."""
    before: dict[str, Digest]
    """Parameters by name before the first step."""
    after: dict[str, Digest]
    """Parameters by name after the last step."""
    place: dict[str, int]
    """This rank's index in each of Megatron's grids: `tensor_model_parallel`, ..."""
    dropped: dict[str, str]
    """GPU-only settings that were switched off, with their values in the recipe."""
