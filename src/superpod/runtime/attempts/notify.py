"""Send a message to a webhook when a run is done, stops or stalls. A failure to send is only logged.

The URL is a secret. It comes from an environment variable or a file with mode 0600, is removed from the environment
before other processes start, and never appears in a message, log or file. Standard library only.
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
    """An event that is reported: the effect of a job's end on its run."""

    END = "end"
    """the run is done"""
    STOP = "stop"
    """no further attempt starts automatically"""
    STALL = "stall"
    """the attempt was ended because a rank made no progress"""


SENTENCES = {Event.END: "is done", Event.STOP: "has stopped", Event.STALL: "has stalled and will be resumed"}

TIMEOUT_S = 5.0
"""Timeout of each network operation, seconds."""
MAX_S = 15.0
"""Timeout of the entire request, seconds."""


class Webhook:
    """A webhook URL and the events to report to it. Without a URL, nothing is sent."""

    def __init__(self, url: str = "", events: tuple[str, ...] = tuple(Event), problem: str = "") -> None:
        self._url, self._events = url, events
        self.problem = problem
        """the reason why there is no valid URL; does not contain the URL"""

    @classmethod
    def from_option(cls, text: str, environ: MutableMapping[str, str] | None = None) -> Webhook:
        """Parse `{"env": NAME, "file": PATH, "on": [events]}`, and remove NAME from `environ`; '' = no webhook."""
        if not text:
            return cls()
        option = json.loads(text)
        name, file = str(option.get("env", "")), str(option.get("file", ""))
        environ = os.environ if environ is None else environ
        url, problem = read_address(name, file, environ)
        environ.pop(name, None)
        return cls(url, tuple(option.get("on", Event)), problem)

    def report_end(self, run: RunFolder, job: str, is_queued: Callable[[], bool]) -> str:
        """Send a message if the end of job `job` is one of this webhook's events; return an error message or ''.

        `is_queued` returns whether another job of the run is pending or this job has been requeued.
        """
        if not (self._url or self.problem):
            return ""
        try:
            event, message = find_event(run, job, is_queued)
            if event is None or event not in self._events:
                return ""
            return self.problem or self.send(build_body(run, job, event, message))
        except Exception as error:  # a failed notification must not change the result of the run
            return type(error).__name__

    def send(self, content: Mapping[str, object]) -> str:
        """Post `content` as JSON to the webhook; return an error message without the URL, or '' on success."""
        problems = [f"the webhook did not respond within {MAX_S:.0f} s"]
        data = json.dumps(content).encode()
        thread = threading.Thread(target=lambda: problems.append(_post(self._url, data)), daemon=True)
        thread.start()
        thread.join(MAX_S)
        return problems[-1]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, which would send the data to a URL that the user did not specify."""

    def redirect_request(self, *_: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None


def _post(url: str, data: bytes) -> str:
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json", "User-Agent": "recipes"})
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as error:
        return f"the webhook responded with status {error.code}"
    except urllib.error.URLError as error:
        reason = "URLError"
        if isinstance(error.reason, OSError):  # other reasons may contain the URL
            reason = error.reason.strerror or type(error.reason).__name__
        return f"the webhook cannot be reached: {reason}"
    except Exception as error:
        return f"the webhook cannot be reached: {type(error).__name__}"


def read_address(name: str, file: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Read a webhook URL from the variable `name` in `environ`, or if it is not set, from `file`.

    Returns:
        The URL and '', or '' and the reason why there is no valid URL; '' and '' if neither source is given.
    """
    url = environ.get(name, "") if name else ""
    source = f"the variable {name}"
    if not url and file:
        source = file
        try:
            facts = os.stat(file)
            if not stat.S_ISREG(facts.st_mode) or facts.st_mode & 0o077 or facts.st_uid not in (0, os.getuid()):
                return "", f"{file} must be a file that only you can read: run `chmod 600 {file}`"
            url = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            return "", f"{file} cannot be read: {getattr(error, 'strerror', 'not a text file')}"
    if not url:
        return "", f"{source} does not contain a URL" if name or file else ""
    with contextlib.suppress(ValueError):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and url.isprintable() and " " not in url:
            return url, ""
    return "", f"{source} does not contain a URL that begins with https:// or http://"


def find_event(run: RunFolder, job: str, is_queued: Callable[[], bool]) -> tuple[Event | None, str]:
    """Return the event to report at the end of a job, and a message; None if the run continues or was cancelled.

    `is_queued` returns whether another job of the run is pending or this job has been requeued.
    """
    if run.done:
        return Event.END, ""
    stop = run.stop
    if stop:
        return (None, "") if stop.by is StoppedBy.USER else (Event.STOP, stop.reason)

    result = run.attempts[-1].result if run.attempts else {}
    is_own, state, message = result.get("job") == job, result.get("state"), str(result.get("message", ""))
    if not is_own and state in (State.RUNNING, State.SAVING):
        return None, ""  # another job trains the run
    if not is_queued():
        why = f"; its last attempt: {message}" if message else ""
        return Event.STOP, f"the run is not done, and no further attempt is queued{why}"
    if is_own and state == State.STALLED:
        return Event.STALL, message
    return None, ""


def build_body(run: RunFolder, job: str, event: Event, message: str) -> dict[str, object]:
    """Return the JSON object to post. Its key `text` is a summary of the event, which Slack and Mattermost display."""
    facts, lines = run.facts, run.metrics()
    step = lines[-1]["step"] if lines else 0
    steps = f"step {step} of {facts.get('max_steps', '?')}"
    reason = f": {message}" if message else ""
    text = f"{run.recipe} {SENTENCES[event]} at {steps}{reason} ({run.path.name})"
    losses = [line["loss"] for line in lines if line.get("loss") is not None]
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
        "loss": losses[-1] if losses else None,
        "message": redact_text(message),
        "t": round(time.time(), 3),
    }
