"""A fake Slurm: its commands as scripts on the PATH that share a file of jobs. It runs nothing."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from pathlib import Path

COMMANDS = ("squeue", "sbatch", "sacct", "scancel", "scontrol")


class FakeSlurm:
    """Its jobs, and every call that it got."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        self._state, self._calls = folder / "jobs.json", folder / "calls.txt"
        self._private = folder / "private.txt"
        self._state.write_text("[]")
        for name in COMMANDS:
            script = self.bin / name
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "{folder}" {name} "$@"\n')
            script.chmod(0o755)

    @property
    def env(self) -> dict[str, str]:
        """What a command needs to find it."""
        return {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}

    @property
    def jobs(self) -> list[dict[str, str]]:
        """All jobs: id, name, state, user."""
        return json.loads(self._state.read_text())

    def add(self, name: str, state: str, *, user: int | None = None, job: str = "") -> str:
        """A job of this user, or of another one; returns its id."""
        jobs = self.jobs
        job = job or str(100 + len(jobs))
        owner = str(os.geteuid() if user is None else user)
        self._state.write_text(json.dumps([*jobs, {"id": job, "name": name, "state": state, "user": owner}]))
        return job

    def hide(self, kinds: str, user: int = 1001) -> None:
        """Set PrivateData, such as `jobs,usage`, and let `id` report this user: root would see all jobs."""
        self._private.write_text(kinds)
        script = self.bin / "id"
        script.write_text(f"#!/bin/sh\ncase $1 in -u) echo {user};; -un) echo user{user};; esac\n")
        script.chmod(0o755)

    def calls(self, name: str) -> list[str]:
        """The arguments of every call of a command, one line each."""
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        return [line.partition(" ")[2] for line in lines if line.partition(" ")[0] == name]


def main(folder: Path, name: str, words: list[str]) -> None:
    """What one of the commands does."""
    with (folder / "calls.txt").open("a") as calls:
        calls.write(" ".join([name, *words]).replace("\n", " ") + "\n")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        jobs = json.loads((folder / "jobs.json").read_text())
        pairs = (word.removeprefix("--").partition("=") for word in words if word.startswith("--"))
        options = {name: value for name, _, value in pairs}
        if name == "sbatch":
            job = {
                "id": str(100 + len(jobs)),
                "name": options["job-name"],
                "state": "PENDING",
                "user": str(os.geteuid()),
            }
            (folder / "jobs.json").write_text(json.dumps([*jobs, job]))
            print(job["id"])
        elif name == "squeue":
            _squeue(jobs, options, own_only="jobs" in _private(folder))
        elif name == "scontrol":
            print(f"Configuration data as of 2026-11-22T22:00:00\nPrivateData             = {_private(folder)}")
        elif name == "sacct":
            ids = words[words.index("-j") + 1].split(",")
            print("\n".join(f"{job['id']}|{job['state']}" for job in jobs if job["id"] in ids))


def _private(folder: Path) -> str:
    file = folder / "private.txt"
    return file.read_text() if file.exists() else "none"


def _squeue(jobs: list[dict[str, str]], options: dict[str, str], *, own_only: bool) -> None:
    users = options["users"].split(",") if "users" in options else [str(os.geteuid())] if "me" in options else None
    over = ("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT")
    for job in jobs:
        if own_only and job["user"] != str(os.geteuid()):
            continue
        if (users is None or job["user"] in users) and (options.get("states") == "all" or job["state"] not in over):
            print("\x1f".join([job["id"], job["name"], job["state"], "None", "N/A"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
