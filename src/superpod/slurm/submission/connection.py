"""The machine that has Slurm's commands: this one, or one behind SSH. Both take words, never text for a shell.

Plain OpenSSH, so that the user's own keys, jump hosts and agents work. NeMo-Run's tunnels do the same, but importing it
takes 3 to 7 s, and a submission should take less than 5.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from superpod.errors import UserError
from superpod.slurm.preflight import inherited

if TYPE_CHECKING:
    from superpod.slurm.profiles.profiles import Cluster


MAX_LINES = 6
"""Of what a failed command wrote: a hundred nodes say the same, each in its own name."""


def deduplicate_lines(text: str) -> str:
    """The first lines of what a command wrote, each once whatever node said it."""
    lines = {re.sub(r"^(\w+)-[\w.-]+: ", r"\1: ", line): line for line in reversed(text.strip().splitlines())}
    first = [*reversed(lines.values())]
    left = len(first) - MAX_LINES
    return "\n".join([*first[:MAX_LINES], *([f"({left} more lines)"] if left > 0 else [])])


class Connection:
    """This machine."""

    remote = False

    def run(
        self, words: list[str], *, stdin: bytes = b"", env: dict[str, str] | None = None, limit_s: float = 60
    ) -> str:
        """What a command prints.

        Raises:
            UserError: it is not installed, fails, or does not answer; with what it wrote to stderr.
        """
        return self.run_bytes(words, stdin=stdin, env=env, limit_s=limit_s).decode(errors="replace")

    def run_bytes(
        self, words: list[str], *, stdin: bytes = b"", env: dict[str, str] | None = None, limit_s: float = 60
    ) -> bytes:
        """What a command prints, as bytes. Raises UserError as `run` does."""
        command = self._command(words, env or {})
        try:
            done = subprocess.run(
                command, input=stdin, capture_output=True, timeout=limit_s, env=self._environment(env)
            )
        except FileNotFoundError:
            raise UserError(f"{self}: {words[0]} is not installed", "run this on the cluster's login node") from None
        except subprocess.TimeoutExpired:
            raise UserError(f"{self}: {words[0]} has not answered for {limit_s:.0f} s", "try again later") from None
        if done.returncode:
            message = deduplicate_lines((done.stderr or done.stdout).decode(errors="replace"))
            tool = words[2] if words[0] == "timeout" else words[0]
            raise UserError(f"{self}: {tool}: {message or f'exit code {done.returncode}'}")
        return done.stdout

    def shell(self, script: str, *words: str, limit_s: float = 60) -> str:
        """What a shell script prints; `words` are its arguments."""
        return self.run(["sh", "-s", "--", *words], stdin=script.encode(), limit_s=limit_s)

    def _command(self, words: list[str], env: dict[str, str]) -> list[str]:
        return words

    def _environment(self, env: dict[str, str] | None) -> dict[str, str] | None:
        return inherited.without_options(os.environ) | (env or {})

    def __str__(self) -> str:
        return "this machine"


class SshConnection(Connection):
    """A machine behind SSH. OpenSSH keeps the connection for a minute, so that only the first command waits for it."""

    remote = True

    def __init__(self, host: str, user: str = "", port: int = 22, key: str = "") -> None:
        self.target = f"{user}@{host}" if user else host
        self._options = ["-o", "BatchMode=yes", "-p", str(port), *(["-i", key] if key else [])]
        # %C is a hash of host, port and user: ssh limits the length of a socket's path.
        control = Path.home() / ".ssh" / "superpod-%C"
        self._options += ["-o", "ControlMaster=auto", "-o", f"ControlPath={control}", "-o", "ControlPersist=60"]

    def _command(self, words: list[str], env: dict[str, str]) -> list[str]:
        exported = [f"{name}={value}" for name, value in env.items()]
        # sshd hands the words to a shell as one line.
        remote = shlex.join(["sh", "-c", inherited.CLEAN, "sh", *(["env", *exported] if exported else []), *words])
        return ["ssh", *self._options, self.target, remote]

    def _environment(self, env: dict[str, str] | None) -> None:
        return None

    def __str__(self) -> str:
        return self.target


def connect(cluster: Cluster) -> Connection:
    """The connection to a cluster's Slurm."""
    login = cluster.login
    return SshConnection(login.host, login.user, login.port, login.key) if login.host else Connection()
