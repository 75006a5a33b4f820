"""Runs Slurm's commands on this machine or over SSH. Commands are argument lists, never shell text.

With OpenSSH, the user's keys, jump hosts and agents work. NeMo-Run's tunnels are not used, because its import takes 3
to 7 s, and a submission should take less than 5 s.
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
"""Maximum number of lines of a failed command's output in an error message."""


def deduplicate_lines(text: str) -> str:
    """Return the first MAX_LINES distinct lines of `text`; lines that differ only in the node name are equal."""
    lines: dict[str, str] = {}
    for line in text.strip().splitlines():
        lines.setdefault(re.sub(r"^(\w+)-[\w.-]+: ", r"\1: ", line), line)
    shown_lines = [*lines.values()][:MAX_LINES]
    hidden_count = len(lines) - len(shown_lines)
    if hidden_count:
        shown_lines.append(f"({hidden_count} more lines)")
    return "\n".join(shown_lines)


class Connection:
    """Runs commands on this machine."""

    remote = False

    def run(
        self, command: list[str], *, stdin: bytes = b"", env: dict[str, str] | None = None, limit_s: float = 60
    ) -> str:
        """Run a command and return its stdout.

        Args:
            command: program and arguments.
            stdin: input of the command.
            env: environment variables to add.
            limit_s: time limit in seconds.

        Raises:
            UserError: the command is not installed, fails (the message is its stderr), or exceeds the time limit.
        """
        return self.run_bytes(command, stdin=stdin, env=env, limit_s=limit_s).decode(errors="replace")

    def run_bytes(
        self, command: list[str], *, stdin: bytes = b"", env: dict[str, str] | None = None, limit_s: float = 60
    ) -> bytes:
        """Run a command like `run`, and return its stdout as bytes."""
        try:
            process = subprocess.run(
                self._command(command, env or {}),
                input=stdin,
                capture_output=True,
                timeout=limit_s,
                env=self._environment(env),
            )
        except FileNotFoundError:
            raise UserError(f"{self}: {command[0]} is not installed", "run it on the cluster's login node") from None
        except subprocess.TimeoutExpired:
            raise UserError(f"{self}: {command[0]} did not answer within {limit_s:.0f} s", "try again later") from None
        if process.returncode:
            message = deduplicate_lines((process.stderr or process.stdout).decode(errors="replace"))
            tool = command[2] if command[0] == "timeout" else command[0]
            raise UserError(f"{self}: {tool}: {message or f'exit code {process.returncode}'}")
        return process.stdout

    def shell(self, script: str, *arguments: str, limit_s: float = 60) -> str:
        """Run a shell script with arguments and return its stdout. Raises the errors of `run`."""
        return self.run(["sh", "-s", "--", *arguments], stdin=script.encode(), limit_s=limit_s)

    def _command(self, command: list[str], env: dict[str, str]) -> list[str]:
        return command

    def _environment(self, env: dict[str, str] | None) -> dict[str, str] | None:
        return inherited.without_options(os.environ) | (env or {})

    def __str__(self) -> str:
        return "this machine"


class SshConnection(Connection):
    """Runs commands over SSH. The connection remains open for a minute for further commands."""

    remote = True

    def __init__(self, host: str, user: str = "", port: int = 22, key: str = "") -> None:
        self.target = f"{user}@{host}" if user else host
        self._options = ["-o", "BatchMode=yes", "-p", str(port)]
        if key:
            self._options += ["-i", key]
        # %C is a hash of host, port and user, because the length of a socket path is limited.
        control = Path.home() / ".ssh" / "superpod-%C"
        self._options += ["-o", "ControlMaster=auto", "-o", f"ControlPath={control}", "-o", "ControlPersist=60"]

    def _command(self, command: list[str], env: dict[str, str]) -> list[str]:
        if env:
            command = ["env", *(f"{name}={value}" for name, value in env.items()), *command]
        # sshd passes the arguments to a shell as one line.
        remote = shlex.join(["sh", "-c", inherited.UNSET_OPTIONS, "sh", *command])
        return ["ssh", *self._options, self.target, remote]

    def _environment(self, env: dict[str, str] | None) -> None:
        return None

    def __str__(self) -> str:
        return self.target


def connect(cluster: Cluster) -> Connection:
    """Return a connection to the login node of a profile, or to this machine if the profile has none."""
    login = cluster.login
    if not login.host:
        return Connection()
    return SshConnection(login.host, login.user, login.port, login.key)
