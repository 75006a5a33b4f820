"""`[notify]`: a real HTTP server, real run folders; the address is a secret and stands nowhere."""

import http.server
import json
import threading
import time
from pathlib import Path

import pytest

from superpod.common.json_files import append_line, write_json
from superpod.runtime.attempts import guard, notify
from superpod.runtime.attempts.notify import Webhook
from superpod.runtime.runs import run_state
from superpod.runtime.runs.run_folder import RunFolder

SECRET = "T0000/B0000/neverwritten"


class Server(http.server.ThreadingHTTPServer):
    """A webhook on this machine; `answer` is its code, `slow_s` how long it thinks."""

    def __init__(self) -> None:
        self.bodies, self.answer, self.slow_s = [], 200, 0.0
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/services/{SECRET}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self):
        length = int(self.headers["Content-Length"])
        self.server.bodies.append((self.path, self.headers["Content-Type"], json.loads(self.rfile.read(length))))
        time.sleep(self.server.slow_s)
        self.send_response(self.server.answer)
        if self.server.answer == 302:
            self.send_header("Location", self.server.url + "/elsewhere")
        self.end_headers()

    def log_message(self, *_):
        """Quiet."""


@pytest.fixture
def server():
    with Server() as started:
        threading.Thread(target=started.serve_forever, daemon=True).start()
        yield started
        started.shutdown()


@pytest.fixture
def run(tmp_path):
    folder = RunFolder.create(tmp_path / "runs", "toy", facts={"max_steps": 10, "cluster": "bed"}, recipe_lines=[])
    folder.new_attempt(job="7").finish("failed", message="srun: task 3 killed", exit_code=1)
    append_line(folder.path / "metrics.jsonl", {"step": 4, "loss": 2.5, "t": 1.0, "attempt": "001"})
    return folder


def webhook(server, **more) -> Webhook:
    environ = {"HOOK": server.url}
    made = Webhook.from_option(json.dumps({"env": "HOOK", "file": "", **more}), environ)
    assert environ == {}, "the ranks and env.json never see the address"
    return made


def test_the_end_of_a_run_is_one_message(server, run):
    write_json(run.path / "done", {"step": 10})
    assert webhook(server).report_end(run, "7", lambda: False) == ""
    ((path, kind, body),) = server.bodies
    assert (path, kind) == (f"/services/{SECRET}", "application/json")
    assert (body["event"], body["recipe"], body["step"], body["max_steps"], body["loss"]) == ("end", "toy", 4, 10, 2.5)
    assert body["cluster"] == "bed"
    assert body["text"].startswith("toy is done at step 4 of 10")
    assert SECRET not in json.dumps(body)


def test_a_stop_says_why(server, run):
    guard.stop(run, "2 consecutive attempts wrote no new checkpoint", by=run_state.StoppedBy.AUTOMATIC)
    webhook(server).report_end(run, "7", lambda: False)
    assert (server.bodies[0][2]["event"], server.bodies[0][2]["message"][:10]) == ("stop", "2 consecut")


def test_a_run_with_nothing_queued_has_stopped(server, run):
    webhook(server).report_end(run, "7", lambda: False)
    assert server.bodies[0][2]["event"] == "stop"
    assert "no further attempt is queued; its last attempt: srun: task 3 killed" in server.bodies[0][2]["message"]


def test_a_stall(server, run):
    run.new_attempt(job="8").finish("stalled", message="rank 3 on node2 no longer answers")
    webhook(server).report_end(run, "8", lambda: True)
    body = server.bodies[0][2]
    assert (body["event"], body["message"]) == ("stall", "rank 3 on node2 no longer answers")


def test_nothing_is_sent_of_a_run_that_goes_on_or_was_cancelled_or_of_another_event(server, run):
    webhook(server).report_end(run, "7", lambda: True)
    webhook(server, on=["end"]).report_end(run, "7", lambda: False)
    guard.stop(run, "cancelled by the user", by=run_state.StoppedBy.USER)
    webhook(server).report_end(run, "7", lambda: False)
    assert server.bodies == []


@pytest.mark.parametrize(("answer", "says"), [(500, "500"), (404, "404"), (302, "302")])
def test_a_refusal_is_a_line_without_the_address(server, run, answer, says):
    server.answer = answer
    problem = webhook(server).report_end(run, "7", lambda: False)
    assert says in problem
    assert SECRET not in problem
    assert len(server.bodies) == 1, "a redirect is not followed"


def test_a_server_that_hangs_holds_nothing_up(server, run, monkeypatch):
    monkeypatch.setattr(notify, "MAX_S", 0.5)
    server.slow_s = 3.0
    began = time.monotonic()
    assert "did not respond within 0 s" in webhook(server).report_end(run, "7", lambda: False)
    assert time.monotonic() - began < 2


def test_nobody_listens(run):
    made = Webhook(f"http://127.0.0.1:9/{SECRET}")
    problem = made.report_end(run, "7", lambda: False)
    assert "cannot be reached" in problem
    assert SECRET not in problem


def test_a_file_is_read_only_where_nobody_else_can(server, run, tmp_path):
    file = tmp_path / "hook"
    file.write_text(server.url + "\n")
    file.chmod(0o640)
    named = json.dumps({"env": "", "file": str(file)})
    assert "chmod 600" in Webhook.from_option(named, {}).report_end(run, "7", lambda: False)
    assert server.bodies == []
    file.chmod(0o600)
    assert Webhook.from_option(named, {}).report_end(run, "7", lambda: False) == ""
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://x/y", "hook", "https:///x", "http://a b/", "https://a\nb"]
)
def test_what_is_no_web_address_is_refused_without_being_printed(url):
    address, problem = notify.read_address("HOOK", "", {"HOOK": url})
    assert address == ""
    assert "does not contain a URL" in problem
    assert url not in problem


def test_without_a_webhook_nothing_is_looked_at():
    def boom() -> bool:
        raise AssertionError("squeue would be asked")

    assert Webhook.from_option("").report_end(RunFolder(Path("/nowhere")), "7", boom) == ""


def test_an_odd_run_folder_is_no_failure(server):
    assert webhook(server).report_end(RunFolder(Path("/nowhere")), "7", lambda: 1 / 0 > 0) == "ZeroDivisionError"
