"""One message to a webhook when a run ends, stops or stalls. Standard library only; a failure is logged, never fatal.

The address is a secret: it comes from an environment variable or from a file of mode 0600, is taken out of the
environment before anything else starts, and stands in no message, log or file.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import stat
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path

from superpod.common.redaction import redact_text
from superpod.runtime.runs.run_folder import RunFolder
from superpod.runtime.runs.run_state import State, StoppedBy


class Event(str, enum.Enum):
    """What the end of a job means for its run."""

    END = "end"
    """the last step is done"""
    STOP = "stop"
    """no further attempt starts by itself"""
    STALL = "stall"
    """a rank is silent, and its attempt was ended"""


SENTENCES = {Event.END: "is done", Event.STOP: "has stopped", Event.STALL: "has stalled, and goes on"}

TIMEOUT_S = 5.0
"""For each answer of the network."""
MOST_S = 15.0
"""For all of it: a server that answers byte by byte holds nothing up."""


class Webhook:
    """Where a run's messages go, and for which events; none without an address."""

    def __init__(self, url: str = "", events: tuple[str, ...] = tuple(Event), problem: str = "") -> None:
        self._url, self._events = url, events
        self.problem = problem
        """why there is no address although one was named; never the address itself"""

    @classmethod
    def from_option(cls, text: str, environ: MutableMapping[str, str] | None = None) -> Webhook:
        """From `{"env": NAME, "file": PATH, "on": [events]}`; takes the address out of the environment."""
        if not text:
            return cls()
        named = json.loads(text)
        environ = os.environ if environ is None else environ
        url, problem = address(str(named.get("env", "")), str(named.get("file", "")), environ)
        environ.pop(str(named.get("env", "")), None)
        return cls(url, tuple(named.get("on", Event)), problem)

    def after(self, run: RunFolder, job: str, is_queued: Callable[[], bool]) -> str:
        """Send what this job's end means for its run, if it is one of the events; returns what went wrong, or ''.

        `is_queued`: whether Slurm has another attempt of the run, or will start this one once more.
        """
        if not (self._url or self.problem):
            return ""
        try:
            event, message = event_of(run, job, is_queued)
            if event is None or event not in self._events:
                return ""
            return self.problem or self.send(body(run, job, event, message))
        except Exception as error:  # whatever it is, the run has ended as it has
            return type(error).__name__

    def send(self, content: Mapping[str, object]) -> str:
        """Post `content` as JSON; returns what went wrong in words without the address, or ''."""
        problems = [f"the webhook has not answered for {MOST_S:.0f} s"]
        data = json.dumps(content).encode()
        thread = threading.Thread(target=lambda: problems.append(_post(self._url, data)), daemon=True)
        thread.start()
        thread.join(MOST_S)
        return problems[-1]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would pass a run's figures on to an address that nobody has named."""

    def redirect_request(self, *_: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None


def _post(url: str, data: bytes) -> str:
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json", "User-Agent": "recipes"})
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as error:
        return f"the webhook answers {error.code}"
    except urllib.error.URLError as error:
        reason = error.reason if isinstance(error.reason, OSError) else None  # others may hold the address
        return f"the webhook cannot be reached: {reason.strerror or type(reason).__name__ if reason else 'URLError'}"
    except Exception as error:
        return f"the webhook cannot be reached: {type(error).__name__}"


def address(name: str, file: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """The address, and why there is none in words that do not hold it; the variable goes before the file."""
    url = environ.get(name, "") if name else ""
    where = f"the variable {name}"
    if not url and file:
        where = file
        try:
            facts = os.stat(file)
            if not stat.S_ISREG(facts.st_mode) or facts.st_mode & 0o077 or facts.st_uid not in (0, os.getuid()):
                return "", f"{file} must be a file of yours that nobody else can read: chmod 600"
            url = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            return "", f"{file} cannot be read: {getattr(error, 'strerror', 'it is no text')}"
    if not url:
        return "", f"{where} holds no address" if name or file else ""
    with contextlib.suppress(ValueError):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and url.isprintable() and " " not in url:
            return url, ""
    return "", f"{where} holds no address that begins with https:// or http://"


def event_of(run: RunFolder, job: str, is_queued: Callable[[], bool]) -> tuple[Event | None, str]:
    """What the end of this job means for its run, and why; None when the run just continues, or its user ended it."""
    if run.done:
        return Event.END, ""
    if stop := run.stop:
        return (None, "") if stop.by is StoppedBy.USER else (Event.STOP, stop.reason)
    result = run.attempts[-1].result if run.attempts else {}
    is_mine, state, message = result.get("job") == job, result.get("state"), str(result.get("message", ""))
    if not is_mine and state in (State.RUNNING, State.SAVING):
        return None, ""  # this job has found the run in use
    if not is_queued():
        why = f"; its last attempt: {message}" if message else ""
        return Event.STOP, f"the run is not done, and no further attempt is queued{why}"
    return (Event.STALL, message) if is_mine and state == State.STALLED else (None, "")


def body(run: RunFolder, job: str, event: Event, message: str) -> dict[str, object]:
    """The JSON of a message; `text` alone says it all, and is what Slack and Mattermost show."""
    facts, lines = run.facts, run.metrics()
    step = lines[-1]["step"] if lines else 0
    steps = f"step {step} of {facts.get('max_steps', '?')}"
    text = f"{run.recipe} {SENTENCES[event]} at {steps}" + (f": {message}" if message else "") + f" ({run.path.name})"
    return {
        "event": event.value,
        "text": redact_text(text),
        "recipe": run.recipe,
        "run": str(run.path),
        "cluster": facts.get("cluster"),
        "job": job,
        "attempt": run.attempts[-1].name if run.attempts else None,
        "step": step,
        "max_steps": facts.get("max_steps"),
        "loss": next((line["loss"] for line in reversed(lines) if line.get("loss") is not None), None),
        "message": redact_text(message),
        "t": round(time.time(), 3),
    }
