"""A pool of processes that resolve and build the sizes of a proof in batches."""

from __future__ import annotations

import multiprocessing
import signal
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
    """Processes that have imported NeMo. They start with the first batch, and end with the block.

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
        if kind:
            for process in self._processes():
                process.kill()
        self._kill()

    def run(
        self, work: Callable[[list[SizeKey]], list[Result]], size_keys: Mapping[str, SizeKey], batch: int
    ) -> Iterator[dict[str, Result]]:
        """Call `work` with batches of sizes, and yield the results of each batch by key, in order of completion."""
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
        """Return the processes for encoders or for all other models, but never start both: each needs 1 GiB.

        NeMo's LlamaEmbeddingModel cannot be built in a process that has built a LlamaModel.
        """
        if encoders not in self._pools:
            self._kill()
            self._others = {*multiprocessing.active_children()}
            spawn = multiprocessing.get_context("spawn")
            self._pools[encoders] = ProcessPoolExecutor(self._count, spawn, _start)
        return self._pools[encoders]

    def _processes(self) -> set[BaseProcess]:
        """Return the running processes of the pool, which starts them one by one."""
        return {*multiprocessing.active_children()} - self._others if self._pools else set()

    def _kill(self) -> None:
        while self._pools:
            self._pools.popitem()[1].shutdown(cancel_futures=True)


def _start() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C signals all processes of the terminal; the parent handles it
    end_with_parent()
    rank_models.start()


def _is_encoder(size: SizeKey) -> bool:
    return find(size.recipe).model.family == "encoders"
