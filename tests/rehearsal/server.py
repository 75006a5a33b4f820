"""One long-lived process that imports NeMo once and forks for every case: importing it costs 10 to 17 s.

Run as a script by conftest.py. Reads jobs as JSON lines on stdin, ``{"id", "case", "without", "after"}``, and answers
``{"id", "outcome": "passed" | "failed" | "hung", "error", "value", "seconds", "log"}``, in the order of
completion. A case runs in one forked process per rank; nothing here may start a thread before the fork.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections import deque
from pathlib import Path

SLOTS = 4  # ranks at a time; more than cores, because they wait for each other
LOOKS, LOOK_S, QUIET = 40, 0.25, 0.1  # a job waits for ever if in a tenth of the last looks at most it wants a core
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


def serve(cases, folder: Path) -> None:
    waiting, running, done, text, closed = [], [], set(), b"", False
    while not closed or waiting or running:
        if not closed and select.select([0], [], [], 0.0 if running else 0.05)[0]:
            chunk = os.read(0, 65536)
            closed = not chunk
            *lines, text = (text + chunk).split(b"\n")
            waiting += [json.loads(line) for line in lines]
        if closed:  # pytest is gone: nobody wants the answers
            waiting.clear()
        for job in [job for job in waiting if job["after"] is None or job["after"] in done]:
            if not running or ranks(running) + cases[job["case"]].ranks <= SLOTS:
                waiting.remove(job)
                running.append(Job(cases, folder, job["id"], job["case"], job["without"]))
        for job in [job for job in running if job.finished(kill=closed)]:
            running.remove(job)
            done.add(job.id)
            if not closed:
                os.write(REPLIES, json.dumps(job.reply()).encode() + b"\n")
        time.sleep(0.02)


def ranks(jobs: list["Job"]) -> int:
    return sum(job.case.ranks for job in jobs)


class Job:
    """One case, running in ``ranks`` forked processes."""

    def __init__(self, cases, folder: Path, id: str, case: str, without: list[str]) -> None:
        self.id, self.name, self.without, self.case = id, case, without, cases[case]
        self.folder = folder / id
        self.folder.mkdir(parents=True)
        self.started, self.deadline = time.time(), time.time() + LIMIT_S
        self.failed = self.hung = False
        self.looks, self.looked_at = deque[bool](maxlen=LOOKS), time.time()
        self.pids = dict(enumerate(self.fork(rank, without) for rank in range(self.case.ranks)))

    def fork(self, rank: int, without: list[str]) -> int:
        pid = os.fork()
        if pid:
            return pid
        os.setsid()
        log = os.open(self.folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(torchrun_environment(rank, self.case.ranks))
        answer = {"ok": False, "error": "the process ended without an answer"}
        try:
            answer = {"ok": True, "value": self.case.run(self.folder, frozenset(without))}
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

    def reply(self) -> dict:
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
    """End what a rank has left behind: Megatron's checkpoint writers are processes that would wait for ever."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def torchrun_environment(rank: int, ranks: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def any_runs(sessions: set[int]) -> bool:
    """Whether a thread of these sessions, of a rank or of what it started, computes or waits for a core or the disk.

    By state and not by CPU time: on a busy machine a rank that works may get little of it.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
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
