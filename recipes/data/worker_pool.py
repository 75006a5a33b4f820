"""Worker processes that leave no trace: Ctrl-C prints nothing from them, and none outlives its parent."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from multiprocessing import resource_tracker
from typing import Any

from superpod.errors import UserError

Run = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[tuple[Any, Any]]]
"""run(function, jobs) yields (job, result) in the order in which they end."""


@contextmanager
def workers(count: int) -> Iterator[Run]:
    """A `Run` over `count` fresh processes (spawned, so that threads of the caller are safe).

    Exceptions of a job come out of the iterator. On any exception the processes are ended at once. UserError when
    a process dies by itself, which is most often a lack of memory.
    """
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # starting it later would end the hold on Ctrl-C in _submit
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_begin, initargs=(count,))
    try:
        yield lambda function, jobs: _run(pool, count, function, jobs)
    except BrokenProcessPool:
        said = f"one of {count} worker processes died, most often for want of memory"
        raise UserError(said, "run the same command again with fewer --workers; what is done is kept") from None
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _run(pool: ProcessPoolExecutor, count: int, function: Callable, jobs: Iterable) -> Iterator[tuple[Any, Any]]:
    """Keep a few jobs per process in flight, so that a long list of jobs costs no memory."""
    left = iter(jobs)
    running: dict[Future, Any] = {_submit(pool, function, job): job for job in islice(left, 2 * count)}
    while running:
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            job = running.pop(future)
            yield job, future.result()
            running.update({_submit(pool, function, job): job for job in islice(left, 1)})


def _submit(pool: ProcessPoolExecutor, function: Callable, *job: Any) -> Future:
    """Submit with Ctrl-C held back: a process that starts meanwhile inherits that, and never prints a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(function, *job)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(count: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["RAYON_NUM_THREADS"] = str(count)  # for the one job that trains a tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)
