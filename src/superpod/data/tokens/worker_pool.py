"""A pool of worker processes that print nothing on Ctrl-C and end with their parent."""

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


class RunJobs(Protocol):
    """Type of a function run(function, jobs) that yields (job, result) as the jobs finish."""

    def __call__(self, function: Callable[[Item], Result], jobs: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
        """Call `function(job)` for each job in a worker process; the function and the jobs must be picklable."""
        ...


@contextmanager
def start_workers(count: int) -> Iterator[RunJobs]:
    """Start `count` worker processes, and provide the function that runs jobs in them.

    Its iterator raises the exceptions of jobs. On any exception, the processes are killed.

    Raises:
        UserError: a worker process died, usually because of insufficient memory.
    """
    # A fork would copy locks that other threads hold, and could deadlock.
    context = multiprocessing.get_context("spawn")
    # If _submit started the tracker, it would unblock SIGINT in this process.
    resource_tracker.ensure_running()
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_initialize_worker, initargs=(count,))

    def run(function: Callable[[Item], Result], jobs: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
        return _run_jobs(pool, count, function, jobs)

    try:
        yield run
    except BrokenProcessPool:
        message = f"one of {count} worker processes died, probably because of insufficient memory"
        raise UserError(message, "run the same command with fewer --workers; finished shards are kept") from None
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _run_jobs(
    pool: ProcessPoolExecutor, count: int, function: Callable[[Item], Result], jobs: Iterable[Item]
) -> Iterator[tuple[Item, Result]]:
    """Yield (job, result) as jobs finish, with at most two jobs per process in flight, to limit memory."""
    remaining_jobs = iter(jobs)
    running: dict[Future[Result], Item] = {
        _submit(pool, function, job): job for job in islice(remaining_jobs, 2 * count)
    }
    while running:
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            job = running.pop(future)
            yield job, future.result()
            running.update({_submit(pool, function, job): job for job in islice(remaining_jobs, 1)})


def _submit(pool: ProcessPoolExecutor, function: Callable[[Item], Result], job: Item) -> "Future[Result]":
    """Submit a job with SIGINT blocked, so that processes started here inherit the mask and ignore Ctrl-C."""
    # The mask is inherited, so it is set in the parent: the child could be interrupted before its first line.
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(function, job)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def _initialize_worker(count: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["RAYON_NUM_THREADS"] = str(count)  # for the job that trains a tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    end_with_parent()
