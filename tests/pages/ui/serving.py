"""Starts `recipes ui` as a process and sends requests to it over sockets."""

import http.client
import json
import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from urllib.parse import urlencode, urlsplit

from tests.conftest import environment_of


class Served:
    """The process, its address and its output."""

    def __init__(self, process, url, errors):
        self.process, self.url, self._errors = process, url, errors
        parts = urlsplit(url)
        self.port, self.token = parts.port, parts.path.strip("/")

    @property
    def errors(self):
        return self._errors.read_text()

    def ask(self, path, *, address="127.0.0.1", method="GET", headers=None, host=None):
        """Send a request; returns (status, headers, text). A path without a leading slash is relative to the token."""
        connection = http.client.HTTPConnection(address, self.port, timeout=120)
        target = path if path.startswith("/") else f"/{self.token}/{path}"
        connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        if host != "":
            connection.putheader("Host", host or f"127.0.0.1:{self.port}")
        for name, value in (headers or {}).items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, dict(answer.getheaders()), text

    def json(self, path, **given):
        status, _, text = self.ask(path + (f"?{urlencode(given)}" if given else ""))
        assert status == 200, text
        return json.loads(text)

    def plan(self, **given):
        values = {"model": "llama3_8b", "gpu": "h100", "gpus": "16", "seq": "8192", "gbs": "64", "precision": "bf16"}
        return self.ask(f"plan?{urlencode({**values, **given})}")

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=30)


@contextmanager
def serving(folder, *words):
    """Start `recipes ui --runs FOLDER ...` with a terminal as stdout and a file next to the folder as stderr."""
    main, side = pty.openpty()
    errors = folder.parent / f"ui-{time.monotonic_ns()}.err"
    command = [sys.executable, "-m", "superpod.cli", "ui", "--runs", str(folder), *words]
    with errors.open("w") as file:
        streams = {"stdin": subprocess.DEVNULL, "stdout": side, "stderr": file}
        process = subprocess.Popen(command, env=environment_of({}), **streams)
    os.close(side)
    try:
        text = b""
        while b"\n" not in text:
            text += os.read(main, 4096)
        yield Served(process, text.decode().strip(), errors)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(main)
