"""Worker processes that leave no trace: Ctrl-C prints nothing from them, and none outlives its parent."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from multiprocessing import resource_tracker
from typing import Protocol, TypeVar

from superpod.common.parent_death import end_with_parent
from superpod.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")


class Run(Protocol):
    """run(function, jobs) yields (job, result) in the order in which the jobs end."""

    def __call__(self, function: Callable[[Item], Result], jobs: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
        """Start the jobs in worker processes; the function and its arguments must be picklable."""
        ...


@contextmanager
def workers(count: int) -> Iterator[Run]:
    """A `Run` over `count` fresh processes (spawned, so that threads of the caller are safe).

    The iterator raises a job's exception. On any exception the processes are killed at once.

    Raises:
        UserError: a process died by itself, most often for lack of memory.
    """
    context = multiprocessing.get_context("spawn")
    # Started later, from _submit, the tracker would unblock SIGINT in this process, and Ctrl-C with it.
    resource_tracker.ensure_running()
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_begin, initargs=(count,))

    def run(function: Callable[[Item], Result], jobs: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
        return _run(pool, count, function, jobs)

    try:
        yield run
    except BrokenProcessPool:
        message = f"one of {count} worker processes died, most often for lack of memory"
        raise UserError(message, "run the same command again with fewer --workers; what is done is kept") from None
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _run(
    pool: ProcessPoolExecutor, count: int, function: Callable[[Item], Result], jobs: Iterable[Item]
) -> Iterator[tuple[Item, Result]]:
    """Keep two jobs per process in flight, so that a long list of jobs costs no memory."""
    left = iter(jobs)
    running: dict[Future[Result], Item] = {_submit(pool, function, job): job for job in islice(left, 2 * count)}
    while running:
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            job = running.pop(future)
            yield job, future.result()
            running.update({_submit(pool, function, job): job for job in islice(left, 1)})


def _submit(pool: ProcessPoolExecutor, function: Callable[[Item], Result], job: Item) -> "Future[Result]":
    """Submit with Ctrl-C blocked: a process that starts meanwhile inherits that, and never prints a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(function, job)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(count: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["RAYON_NUM_THREADS"] = str(count)  # for the one job that trains a tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    end_with_parent()
