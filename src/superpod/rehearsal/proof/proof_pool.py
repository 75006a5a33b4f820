"""A pool of processes that resolve and build the sizes of a proof in batches."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import TypeVar

from superpod.collection.registry import find
from superpod.common.parent_death import end_with_parent
from superpod.rehearsal.proof import rank_models
from superpod.rehearsal.proof.rank_models import SizeKey

Result = TypeVar("Result")
Note = Callable[[str, int, int], None]
"""Function that is called with an activity, the number of completed items and their total."""


class Workers:
    """A pool of processes that have imported NeMo. They start with the first batch, and end with the `with` block.

    An error or Ctrl-C kills them: incomplete batches are lost, completed ones have already been returned.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._pools: dict[bool, ProcessPoolExecutor] = {}
        self._others: set[BaseProcess] = set()
        """Children of this process that do not belong to the pool."""

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind and self._pools:
            for process in {*multiprocessing.active_children()} - self._others:
                process.kill()
        self._shut_down()

    def run(
        self, work: Callable[[list[SizeKey]], list[Result]], size_keys: Mapping[str, SizeKey], batch: int
    ) -> Iterator[dict[str, Result]]:
        """Call a function with batches of sizes in the processes; yield {key: result} of each completed batch.

        Args:
            work: function that returns a result for each size of a list.
            size_keys: the sizes by key.
            batch: maximum number of sizes per call.
        """
        order = sorted(size_keys, key=lambda key: (size_keys[key].recipe, size_keys[key].nodes, key))
        for encoders in (True, False):
            keys = [key for key in order if _is_encoder(size_keys[key]) is encoders]
            batches = [keys[i : i + batch] for i in range(0, len(keys), batch)]
            if not batches:
                continue
            pool = self._pool(encoders)
            pending_batches = {
                pool.submit(work, [size_keys[key] for key in batch_keys]): batch_keys for batch_keys in batches
            }
            for done in as_completed(pending_batches):
                yield dict(zip(pending_batches[done], done.result(), strict=True))

    def _pool(self, encoders: bool) -> ProcessPoolExecutor:
        """Return the pool for encoders or for all other models, after ending the other pool: a process needs 1 GiB.

        NeMo's LlamaEmbeddingModel cannot be built in a process that has built a LlamaModel.
        """
        if encoders not in self._pools:
            self._shut_down()
            self._others = {*multiprocessing.active_children()}
            spawn = multiprocessing.get_context("spawn")
            self._pools[encoders] = ProcessPoolExecutor(self._count, spawn, _start)
        return self._pools[encoders]

    def _shut_down(self) -> None:
        while self._pools:
            self._pools.popitem()[1].shutdown(cancel_futures=True)


def _start() -> None:
    end_with_parent()
    rank_models.start()


def _is_encoder(size: SizeKey) -> bool:
    return find(size.recipe).model.family == "encoders"
