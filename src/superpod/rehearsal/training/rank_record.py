"""The JSON that each rank of a rehearsal writes when its training ends; `recorder.py` fills it."""

from typing import TypedDict

MicroBatch = list[list[list[int]]]
"""[tokens, positions] of the samples that entered the model, each [samples][tokens of this rank]."""
Digest = tuple[str, bool, bool, bool]
"""Of a parameter: a hash of its bits, whether tensor parallelism shards it, whether it belongs to an expert, and
whether it is an embedding that the first and the last stage share."""


class RankRecord(TypedDict):
    """What one rank did. Times are Unix times in seconds."""

    losses: list[float]
    grad_norms: list[float]
    """Before clipping; empty where the optimizer reports none."""
    built: float
    """When NeMo's objects were made."""
    started: float
    """When the weights were loaded."""
    step_ends: list[float]
    first_step: int
    layers: list[int]
    """Numbers of this rank's decoder layers, from 1."""
    inputs: list[list[MicroBatch]]
    """Of the first steps, the micro-batches that entered the model on this rank: none but on the first stage."""
    before: dict[str, Digest]
    after: dict[str, Digest]
    place: dict[str, int]
    """This rank's index in each of Megatron's grids: `tensor_model_parallel`, ..."""
    dropped: dict[str, str]
    """GPU-only settings that were switched off, with the recipe's values."""
