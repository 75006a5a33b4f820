"""Ends the stray processes that killed ranks have left on the nodes of a job. Standard library only.

A rank that is killed leaves children: Megatron's manager of its checkpoint writers waits for requests for ever. Slurm
ends them with the step where it tracks processes by cgroups; where it tracks them by their parents
(proctrack/linuxproc), they live on, and Slurm waits a minute before the next job starts. They hold memory, some
the lock of the ranks, and one that still writes would write into the checkpoint that the next attempt saves under the
same name. Most end with their rank (common/parent_death.py). An attempt ends the others on each of its nodes, found by
the mark in their environment, when its ranks have failed. If that attempt was ended too, the next one does so before it
starts its own ranks.

As a step of the job: `python3 stray_processes.py PATH` ends what is marked with an attempt PATH, or any attempt of a
run PATH, and prints how many it has ended, and which are still there.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

if __name__ == "__main__":  # run from the run folder, which holds what it imports
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from superpod.common import locks
from superpod.diagnosis import job_end
from superpod.errors import UserError
from superpod.runtime.attempts import job_code, job_step
from superpod.runtime.processes import attempt_processes
from superpod.runtime.runs.run_folder import RunFolder

GONE_S = 10.0
"""How long a process may take to go, once it is killed: one that waits for a disk goes when that answers."""

STEP_S = 30.0
"""How long the nodes may take to answer; one that hangs never does."""

LOCK_S = 60.0
"""How long to wait for an earlier attempt that is just ending."""

POLL_S = 1.0

UNENDED = ("", *job_end.LIVE)
"""States of a job whose processes may still be at work; '' when nobody knows."""

ENDED = "leftovers_ended"
"""Key of result.json: true where an attempt's processes have all gone, on every node of its job."""


class StrayProcesses:
    """Ends the stray processes of a run on the nodes of this job; `steps` counts the job steps that this took.

    Made before the job opens its attempt.
    """

    def __init__(self, run: RunFolder, nodes: list[str], job: str, log: Callable[[str], None]) -> None:
        self._run, self._nodes, self._job, self._log, self.steps = run, nodes, job, log, 0
        self._earlier = run.attempts
        self._until = time.monotonic() + LOCK_S

    @contextlib.contextmanager
    def run_taken_over(self) -> Iterator[None]:
        """The run's lock. Waits up to LOCK_S for an earlier attempt that is just ending; ranks of it may still save.

        Raises:
            UserError: the attempt goes on.
        """
        with contextlib.ExitStack() as stack:
            while True:
                try:
                    stack.enter_context(self._run.lock(ranks=False))
                    break
                except UserError:
                    if time.monotonic() > self._until:
                        raise
                    time.sleep(POLL_S)
            while self._ranks_live() and not self._job_has_ended() and time.monotonic() < self._until:
                time.sleep(POLL_S)
            yield

    def end_earlier(self) -> None:
        """End what attempts before this one have left on these nodes, unless all have seen to that themselves."""
        if self._ranks_live() or not all(attempt.result.get(ENDED) for attempt in self._earlier):
            self.end(self._run.path)
            while self._ranks_live() and time.monotonic() < self._until:  # on a node that is not this job's
                time.sleep(POLL_S)

    def _ranks_live(self) -> bool:
        """Whether a rank of an earlier attempt lives, or a child of one, which inherits its lock."""
        return locks.is_held(self._run.path / locks.RANKS)

    def _job_has_ended(self) -> bool:
        """Whether Slurm knows the job of the attempt before as ended. This very job has been requeued since."""
        job = str(self._earlier[-1].result.get("job", "")) if self._earlier else ""
        return bool(job) and (job == self._job or job_end.current_state(job, self._run.output(job)) not in UNENDED)

    def end(self, path: Path) -> bool:
        """End what is marked with an attempt, or any attempt of a run, on every node; whether nothing is left there."""
        nodes = self._nodes or ["this node"]
        answers = self._answers(len(nodes), path) if len(nodes) > 1 else {0: end_here(path)}
        for node, (ended, *left) in sorted(answers.items()):
            if ended:
                self._log(f"{nodes[node]}: ended {ended} process{'es' if ended > 1 else ''} that killed ranks had left")
            if left:
                pids = ", ".join(map(str, left))
                self._log(f"{nodes[node]}: pid {pids} of killed ranks cannot be ended, and may still write checkpoints")
        return len(answers) == len(nodes) and all(len(answer) == 1 for answer in answers.values())

    def _answers(self, nodes: int, path: Path) -> dict[int, list[int]]:
        """`end_here` of the nodes that answer, by their place in the job."""
        command = [sys.executable, job_code.for_nodes("runtime/processes/stray_processes.py"), str(path)]
        try:
            lines, code = job_step.on_every_node(nodes, command, STEP_S)
        except OSError:
            return {}
        answers = {node: json.loads(line) for node, line in lines.items() if re.fullmatch(r"\[.*\]", line)}
        self.steps += bool(answers) or code in (0, None)  # an srun that fails at once has made no step
        return answers


def end_here(path: Path) -> list[int]:
    """Kill what is marked with `path` on this machine: how many have gone, and the ids of those that have not."""
    deadline = time.monotonic() + GONE_S
    killed: set[int] = set()
    while (left := attempt_processes.find(path)) and time.monotonic() < deadline:
        attempt_processes.send(left, signal.SIGKILL)
        killed |= left.keys()
        time.sleep(0.05)
    return [len(killed - left.keys()), *sorted(left)]


if __name__ == "__main__":
    print(json.dumps(end_here(Path(sys.argv[1]))), flush=True)
