"""Kill stray processes of killed ranks on the nodes of a job. Standard library only.

A killed rank may leave children: for example, the process that manages Megatron's checkpoint writers waits for requests
forever. If Slurm tracks processes with cgroups, it kills them with the step. If it tracks them by their parents
(proctrack/linuxproc), they keep running, and Slurm waits a minute before the next job starts. They hold memory, some
hold the lock of the ranks, and one that is still writing could write into the checkpoint that the next attempt saves
under the same name. Most exit with their rank (common/parent_death.py). After its ranks have failed, an attempt kills
the others on each of its nodes, which it finds by MARK in their environment. If that attempt was killed too, the next
attempt does so before it starts its ranks.

As a job step, `python3 stray_processes.py PATH` kills the processes of the attempt PATH, or of all attempts of the run
PATH, and prints how many have exited and the pids of those that remain.
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

if __name__ == "__main__":  # import from the run folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from superpod.common import locks
from superpod.diagnosis import job_end
from superpod.errors import UserError
from superpod.runtime.attempts import job_code, job_step
from superpod.runtime.processes import attempt_processes
from superpod.runtime.runs.run_folder import RunFolder

EXIT_S = 10.0
"""Seconds that a killed process may take to exit. A process that waits for a disk exits only once the disk responds."""

STEP_S = 30.0
"""Seconds that the nodes may take to respond. A node that hangs never responds."""

LOCK_S = 60.0
"""Maximum seconds to wait for the end of an earlier attempt."""

POLL_S = 1.0

LIVE_STATES = ("", *job_end.LIVE_STATES)
"""Slurm states of a job whose processes may still run; '' = unknown."""

ENDED = "leftovers_ended"
"""Key of result.json: true if all processes of an attempt have exited, on every node of its job."""


class StrayProcesses:
    """Kills the stray processes of a run on the nodes of this job. Create it before the job opens its attempt.

    `steps` is the number of job steps that it has started.
    """

    def __init__(self, run: RunFolder, nodes: list[str], job: str, log: Callable[[str], None]) -> None:
        self._run, self._nodes, self._job, self._log, self.steps = run, nodes, job, log, 0
        self._earlier = run.attempts
        self._until = time.monotonic() + LOCK_S

    @contextlib.contextmanager
    def take_over_run(self) -> Iterator[None]:
        """Hold the lock of the run, after waiting up to LOCK_S seconds for an earlier attempt, whose ranks may save.

        Raises UserError if the launcher of the earlier attempt has not exited.
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

    def kill_earlier(self) -> None:
        """Kill stray processes of earlier attempts on this job's nodes, unless all recorded that none remain."""
        if self._ranks_live() or not all(attempt.result.get(ENDED) for attempt in self._earlier):
            self.kill(self._run.path)
            while self._ranks_live() and time.monotonic() < self._until:  # on a node outside this job
                time.sleep(POLL_S)

    def _ranks_live(self) -> bool:
        """Return whether a rank of an earlier attempt is running, or a child of one, which inherits its lock."""
        return locks.is_held(self._run.path / locks.RANKS)

    def _job_has_ended(self) -> bool:
        """Return whether the job of the previous attempt has ended. True if that is this job, after a requeue."""
        job = str(self._earlier[-1].result.get("job", "")) if self._earlier else ""
        if not job:
            return False
        return job == self._job or job_end.current_state(job, self._run.output(job)) not in LIVE_STATES

    def kill(self, path: Path) -> bool:
        """Kill the processes of the attempt or run with the folder `path` on all nodes; return whether none remain."""
        nodes = self._nodes or ["this node"]
        answers = self._kill_on_nodes(len(nodes), path) if len(nodes) > 1 else {0: kill_here(path)}
        for node, (ended, *left) in sorted(answers.items()):
            if ended:
                plural = "es" if ended > 1 else ""
                self._log(f"{nodes[node]}: killed {ended} stray process{plural} of killed ranks")
            if left:
                pids = ", ".join(map(str, left))
                self._log(
                    f"{nodes[node]}: stray processes of killed ranks could not be killed and may still write "
                    f"checkpoints: pid {pids}"
                )
        return len(answers) == len(nodes) and all(len(answer) == 1 for answer in answers.values())

    def _kill_on_nodes(self, nodes: int, path: Path) -> dict[int, list[int]]:
        """Run `kill_here` on all nodes; return the results of the nodes that respond, by their index in the job."""
        command = [sys.executable, job_code.path_for_nodes("runtime/processes/stray_processes.py"), str(path)]
        try:
            lines, code = job_step.run_on_every_node(nodes, command, STEP_S)
        except OSError:
            return {}
        last_lines = {node: printed[-1] for node, printed in lines.items()}
        answers = {node: json.loads(line) for node, line in last_lines.items() if re.fullmatch(r"\[.*\]", line)}
        if answers or code in (0, None):  # an srun that fails immediately has not created a step
            self.steps += 1
        return answers


def kill_here(path: Path) -> list[int]:
    """Kill the processes of the attempt or run with the folder `path` on this machine.

    Returns the number of processes that have exited, followed by the pids of those that have not.
    """
    deadline = time.monotonic() + EXIT_S
    killed: set[int] = set()
    while True:
        remaining_processes = attempt_processes.find(path)
        if not remaining_processes or time.monotonic() >= deadline:
            return [len(killed - remaining_processes.keys()), *sorted(remaining_processes)]
        attempt_processes.send(remaining_processes, signal.SIGKILL)
        killed |= remaining_processes.keys()
        time.sleep(0.05)


if __name__ == "__main__":
    print(json.dumps(kill_here(Path(sys.argv[1]))), flush=True)
