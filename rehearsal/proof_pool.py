"""Processes that resolve and build for a proof, a batch at a time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from superpod.recipes.registry import find
from superpod.rehearsal import rank_models
from superpod.rehearsal.rank_models import SizeKey

Result = TypeVar("Result")
Note = Callable[[str, int, int], None]
"""Called with what is done, how many are, and of how many."""


def run(
    work: Callable[[list[SizeKey]], list[Result]], wanted: Mapping[str, SizeKey], workers: int, batch: int
) -> Iterator[dict[str, Result]]:
    """`work` on every size, in `workers` processes: the results of a batch as soon as they are there, by their keys.

    Ctrl-C drops what has not begun, and waits for the batches that have.
    """
    for keys in _pools(wanted):
        if not keys:
            continue
        spawn = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(min(workers, -(-len(keys) // batch)), spawn, rank_models.start)
        try:
            batches = [keys[i : i + batch] for i in range(0, len(keys), batch)]
            results = pool.map(work, [[wanted[key] for key in some] for some in batches])
            for some, outcomes in zip(batches, results, strict=True):
                yield dict(zip(some, outcomes, strict=True))
        finally:
            pool.shutdown(cancel_futures=True)


def _pools(wanted: Mapping[str, SizeKey]) -> tuple[Sequence[str], Sequence[str]]:
    """Keys in the order of their recipes, encoders by themselves.

    NeMo's LlamaEmbeddingModel cannot be built in a process that has built a LlamaModel.
    """
    order = sorted(wanted, key=lambda key: (wanted[key].recipe, wanted[key].nodes, key))
    encoders = {key for key in order if find(wanted[key].recipe).model.family == "encoders"}
    return sorted(encoders, key=order.index), [key for key in order if key not in encoders]
