"""What pytest requests of the case server (`case_server.py`), and of scripts that answer in files."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

REFERENCES = {"dp2": "dp-reference", "to-tp1pp4": "tp2pp2", "to-tp4pp1": "tp2pp2"}
REFERENCES |= dict.fromkeys(("moe-ep2", "moe-tp2ep2", "moe-recompute", "moe-lora", "moe-lora-ep2"), "moe-reference")
RESUMES = {"resume", "recompute", "tp2", "tp2-save", "tp2-bf16", "cp2", "pp2vp2", "finetune", "lora"}


SLOW = {
    "biased-experts",
    "fsdp-dp2",
    "moe-lora-ep2",
    "moe-recompute",
    "moe-tp2ep2",
    "offload-bf16",
    "precise-bf16",
    "to-tp4pp1",
    "tp2-bf16",
    "tp2-save",
}
"""Cases of 5 s and more of training, each on a layout or option that another case tries in part."""


class CaseRequest(NamedTuple):
    """A case to run without some patches; ``order``: whether NeMo or the patches are imported first."""

    case: str
    without: tuple[str, ...] = ()
    order: str = "nemo-first"

    @property
    def id(self) -> str:
        return "-without-".join([self.case, *self.without])

    @property
    def reference(self) -> "CaseRequest | None":
        """The request whose checkpoint this one starts from."""
        name = "reference" if self.case in RESUMES else REFERENCES.get(self.case)
        return CaseRequest(name, (), self.order) if name else None


class CaseServer:
    """A server process: takes requests, returns outcomes. It runs each request once."""

    def __init__(self, order: str, folder: Path) -> None:
        self.log = folder / "server.log"
        # wandb and killed ranks leave folders behind. Not below ``folder``: paths of sockets must be short.
        self.temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        script = Path(__file__).with_name("case_server.py")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", str(script), order, str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "TMPDIR": self.temporary.name},
            )
        self.sent: set[str] = set()
        self.outcomes: dict[str, dict[str, Any]] = {}

    def send(self, request: CaseRequest) -> None:
        """Send the request after its reference's; outcomes arrive while tests wait for others."""
        reference = request.reference
        if reference:
            self.send(reference)
        if request.id not in self.sent:
            self.sent.add(request.id)
            after = reference and reference.id
            line = {"id": request.id, "case": request.case, "without": request.without, "after": after}
            assert self.process.stdin
            print(json.dumps(line), file=self.process.stdin, flush=True)

    def outcome(self, request: CaseRequest) -> dict[str, Any]:
        self.send(request)
        assert self.process.stdout
        while request.id not in self.outcomes:
            line = self.process.stdout.readline()
            assert line, f"the server has ended:\n{self.log.read_text()[-3000:]}"
            outcome = json.loads(line)
            self.outcomes[outcome["id"]] = outcome
        return self.outcomes[request.id]

    def close(self) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()  # it kills what runs, and ends
        self.process.wait(timeout=30)
        self.process.stdout.close()
        self.temporary.cleanup()


class AnswerScript:
    """A script that imports NeMo once, then writes one answer after the other: FOLDER/NAME.json."""

    def __init__(self, folder: Path, command: list[str]) -> None:
        self.folder, self.log = folder, folder / "log.txt"
        environment = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", *command],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def wait_for(self, name: str) -> dict[str, Any]:
        """The answer, as soon as the script has written it."""
        file = self.folder / f"{name}.json"
        while not file.is_file():
            assert self.process.poll() is None or file.is_file(), self.log.read_text()[-3000:]
            time.sleep(0.2)
        return json.loads(file.read_text())

    def end(self) -> None:
        """End it and the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait(timeout=30)


def with_outcomes(*requests: CaseRequest) -> pytest.MarkDecorator:
    """Parametrise a test with the outcomes of these requests; those of `SLOW` cases are not in the default tests."""
    cases = [
        pytest.param(request, id=request.id, marks=[pytest.mark.slow] if request.case in SLOW else [])
        for request in requests
    ]
    return pytest.mark.parametrize("outcome", cases, indirect=True)
