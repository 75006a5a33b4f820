"""One long-lived process that imports NeMo once and forks for every case: importing it costs 10 to 17 s.

conftest.py runs it as a script. It reads requests as JSON lines on stdin, ``{"id", "case", "without", "after"}``, and
answers ``{"id", "outcome": "passed" | "failed" | "hung", "error", "value", "seconds", "log"}`` in the order of
completion. A case runs in one forked process per rank; nothing here may start a thread before the fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from superpod.rehearsal.training.forked_run import become_rank

if TYPE_CHECKING:
    from cases import NemoCase

SLOTS = 4  # ranks at a time; more than cores, because they wait for each other
LOOKS, LOOK_S, QUIET = 40, 0.25, 0.1  # a case hangs if it wanted a core in at most a tenth of the last looks
LIMIT_S = 120.0


def main() -> None:
    order, folder = sys.argv[1], Path(sys.argv[2])
    if order == "patches-first":
        from superpod.rehearsal import install

        install()
    import nemo.collections.llm  # noqa: F401
    from cases import CASES
    from nemo.collections.llm.recipes import llama3_8b  # noqa: F401

    serve(CASES, folder)
    os._exit(0)  # NeMo takes seconds to leave


def serve(cases: Mapping[str, NemoCase], folder: Path) -> None:
    waiting, running, done, text, closed = [], [], set(), b"", False
    while not closed or waiting or running:
        if not closed and select.select([0], [], [], 0.0 if running else 0.05)[0]:
            chunk = os.read(0, 65536)
            closed = not chunk
            *lines, text = (text + chunk).split(b"\n")
            waiting += [json.loads(line) for line in lines]
        if closed:  # pytest is gone: nobody waits for the outcomes
            waiting.clear()
        for request in [request for request in waiting if request["after"] is None or request["after"] in done]:
            case = cases[request["case"]]
            if not running or sum(other.case.ranks for other in running) + case.ranks <= SLOTS:
                waiting.remove(request)
                running.append(RunningCase(request, case, folder / request["id"]))
        for case in [case for case in running if case.finished(kill=closed)]:
            running.remove(case)
            done.add(case.id)
            if not closed:
                os.write(REPLIES, json.dumps(case.reply()).encode() + b"\n")
        time.sleep(0.02)


class RunningCase:
    """One case, running in forked processes."""

    def __init__(self, request: dict[str, Any], case: NemoCase, folder: Path) -> None:
        self.id, self.name, self.without, self.case = request["id"], request["case"], request["without"], case
        self.folder = folder
        self.folder.mkdir(parents=True)
        self.started, self.deadline = time.time(), time.time() + LIMIT_S
        self.failed = self.hung = False
        self.looks, self.looked_at = deque[bool](maxlen=LOOKS), time.time()
        self.pids = dict(enumerate(self.fork(rank) for rank in range(case.ranks)))

    def fork(self, rank: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        become_rank(rank, self.case.ranks, self.folder)
        answer: dict[str, Any] = {"ok": False, "error": "the process ended without an answer"}
        try:
            answer = {"ok": True, "value": self.case.run(self.folder, frozenset(self.without))}
        except BaseException as error:
            answer["error"] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        (self.folder / f"{rank}.json").write_text(json.dumps(answer))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if answer["ok"] else 1)

    def finished(self, kill: bool) -> bool:
        for rank, pid in list(self.pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.pids[rank]
                end_group(pid)
                if status:  # the other ranks would wait for it for ever
                    self.failed, self.deadline = True, min(self.deadline, time.time() + 1.0)
        if self.pids and (kill or self.hangs() or time.time() > self.deadline):
            self.hung = not self.failed
            for pid in self.pids.values():  # all, before one can report that another is gone
                end_group(pid)
            for pid in self.pids.values():
                os.waitpid(pid, 0)
            self.pids.clear()
        return not self.pids

    def hangs(self) -> bool:
        if time.time() - self.looked_at > LOOK_S:
            self.looked_at = time.time()
            self.looks.append(any_runs(set(self.pids.values())))
        return len(self.looks) == LOOKS and sum(self.looks) <= QUIET * LOOKS

    def reply(self) -> dict[str, Any]:
        answers = [json.loads(path.read_text()) for path in sorted(self.folder.glob("*.json"))]
        complete = len(answers) == self.case.ranks and not self.hung
        errors = [answer["error"] for answer in answers if not answer["ok"]]
        outcome = "hung" if self.hung else "passed" if complete and not errors else "failed"
        return {
            "id": self.id,
            "case": self.name,
            "without": self.without,
            "outcome": outcome,
            "error": " | ".join(errors),
            "value": answers[0].get("value") if complete else None,
            "seconds": round(time.time() - self.started, 1),
            "log": str(self.folder),
        }


def end_group(pid: int) -> None:
    """End the processes that a rank started: Megatron's checkpoint writers would wait for ever."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def any_runs(sessions: set[int]) -> bool:
    """Whether a thread of these sessions, of a rank or of what it started, computes or waits for a core or the disk.

    By state and not by CPU time: on a busy machine a rank that works may get little of it.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            if int(stat(process)[3]) in sessions and any(stat(t)[0] in "RD" for t in process.glob("task/*")):
                return True
    return False


def stat(path: Path) -> list[str]:
    """The fields of proc(5)'s stat from the third on: state, parent, group, session."""
    return (path / "stat").read_text().rpartition(")")[2].split()


# Megatron's checkpoint writer starts processes that import this script again.
if __name__ == "__main__":
    REPLIES = os.dup(1)  # NeMo prints on stdout while it is imported
    os.dup2(2, 1)
    main()
