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
from pathlib import Path

SLOTS = 4  # ranks at a time; more than cores, because they wait for each other
LOOK_S, QUIET_LOOKS = 0.25, 24  # a job of which nobody wants a core in so many looks waits for ever
LIMIT_S = 120.0


def main() -> None:
    order, folder = sys.argv[1], Path(sys.argv[2])
    if order == "patches-first":
        from superpod.launchers.rehearsal import install

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
        self.started, self.deadline, self.timed_out = time.time(), time.time() + LIMIT_S, False
        self.quiet_looks, self.looked_at = 0, time.time()
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
                    self.deadline = min(self.deadline, time.time() + 1.0)
        if self.pids and (kill or self.hangs() or time.time() > self.deadline):
            self.timed_out = True
            for pid in self.pids.values():
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            self.pids.clear()
        return not self.pids

    def hangs(self) -> bool:
        if time.time() - self.looked_at > LOOK_S:
            self.looked_at = time.time()
            self.quiet_looks = 0 if any_runs(set(self.pids.values())) else self.quiet_looks + 1
        return self.quiet_looks >= QUIET_LOOKS

    def reply(self) -> dict:
        answers = [json.loads(path.read_text()) for path in sorted(self.folder.glob("*.json"))]
        errors = [answer["error"] for answer in answers if not answer["ok"]]
        complete = len(answers) == self.case.ranks
        outcome = "failed" if errors else "passed" if complete else "hung" if self.timed_out else "failed"
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
    """Whether a process of these sessions, a rank or what it started, computes, waits for a core or for the disk."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, _, _, session, *_ = path.read_text().rpartition(")")[2].split()
            if int(session) in sessions and state in "RD":
                return True
    return False


# Megatron's checkpoint writer starts processes that import this script again.
if __name__ == "__main__":
    REPLIES = os.dup(1)  # NeMo prints on stdout while it is imported
    os.dup2(2, 1)
    main()
