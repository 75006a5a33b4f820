"""Requests to `recipes ui` over sockets."""

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.pages.ui.serving import serving
from tests.reports.growing_run import GrowingRun
from tests.slurm.slurm_runs import snapshot

SECRET = "only for those with the token"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Create two runs, another file, and a link that leads out of the folder."""
    base = tmp_path_factory.mktemp("served")
    run = GrowingRun(base / "runs")
    run.grow(50, SECRET)
    run.beat(behind=[3])
    GrowingRun(base / "runs", "other")
    outside = GrowingRun(base / "elsewhere", "outside")
    (base / "runs" / "outside").symlink_to(outside.path.parent)
    return base / "runs"


@pytest.fixture(scope="module")
def served(folder):
    with serving(folder) as process:
        yield process


def name_of(served):
    return next(run["id"] for run in served.json("runs.json")["runs"] if run["id"].startswith("tiny_llama3/"))


def test_the_server_listens_on_loopback_only(served):
    words = subprocess.run(["ss", "-Hltn", f"sport = :{served.port}"], capture_output=True, text=True).stdout
    addresses = {line.split()[3].rpartition(":")[0] for line in words.splitlines()}
    assert addresses <= {"127.0.0.1", "[::1]"}
    assert "127.0.0.1" in addresses
    own = socket.gethostbyname_ex(socket.gethostname())[2]
    for address in (one for one in own if not one.startswith("127.")):
        with closing(socket.socket()) as tried:
            tried.settimeout(5)
            assert tried.connect_ex((address, served.port)) != 0


@pytest.mark.parametrize(
    "path",
    [
        "/", "//runs.json",
        "/runs.json", "/plan", "/{token}", "/{almost}/", "/{almost}/runs.json", "/{token}x/runs.json",
        "/x/{token}/runs.json", "/?token={token}", "/%2e%2e/{token}/", "/{upper}/runs.json", "/{token}%00/runs.json",
    ],
)  # fmt: skip
def test_requests_without_the_token_are_refused(served, path):
    words = {"token": served.token, "almost": served.token[:-1] + "~", "upper": served.token.swapcase()}
    status, headers, text = served.ask(path.format(**words))
    assert status == 403
    assert SECRET not in text
    assert served.token not in text + str(headers)
    assert len(text) < 200


def test_the_page_is_served_at_both_addresses(served):
    status, headers, text = served.ask("")
    assert status == 200
    assert "<form" in text
    assert "Set-Cookie" not in headers
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "Server" not in headers
    assert served.token not in text
    if socket.has_ipv6 and os.path.exists("/proc/net/if_inet6"):
        assert served.ask("", address="::1", host=f"[::1]:{served.port}")[0] == 200


@pytest.mark.parametrize("host", ["example.org", "127.0.0.1.example.org:80", ""])
def test_other_host_names_are_refused(served, host):
    status, _, text = served.ask("runs.json", host=host)
    assert status in (400, 403)
    assert "tiny_llama3" not in text


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://example.org"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
    ],
    ids=str,
)
def test_requests_of_other_pages_are_refused(served, headers):
    status, answered, text = served.ask("runs.json", headers=headers)
    assert status == 403
    assert "tiny_llama3" not in text
    assert "Access-Control-Allow-Origin" not in answered


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "BREW"])
def test_other_methods_are_refused(served, method):
    status, _, text = served.ask("runs.json", method=method)
    assert status == 405
    assert "Traceback" not in text


@pytest.mark.parametrize(
    "run",
    [
        "../elsewhere/outside", "outside/{outside}", "/etc", "tiny_llama3/../../elsewhere", "..", ".", "",
        "tiny_llama3/%2e%2e", "x\0y", "<script>alert(1)</script>", "tiny_llama3",
    ],
)  # fmt: skip
def test_runs_outside_the_folder_are_refused(served, folder, run):
    outside = next((folder.parent / "elsewhere" / "outside").iterdir()).name
    answer = served.json("run.json", run=run.format(outside=outside))
    assert "does not exist" in answer["problem"]
    assert set(answer) == {"problem", "hint"}


def test_runs_and_curves_are_served(served):
    rows = {run["id"].partition("/")[0]: run for run in served.json("runs.json")["runs"]}
    assert set(rows) == {"tiny_llama3", "other"}
    assert rows["tiny_llama3"]["step"] == 50
    run = served.json("run.json", run=name_of(served))
    assert run["curves"]["loss"]["x"] == [*range(1, 51)]
    assert run["lines"] == [f"step 50 {SECRET}"]
    assert run["ranks"][1].startswith("slowest: rank 3")
    assert "curves" not in served.json("run.json", run=name_of(served), stamp=run["stamp"])


def test_requests_change_nothing(served, folder):
    before = snapshot(folder)
    for _ in range(3):
        served.json("runs.json")
        served.json("run.json", run=name_of(served))
    assert served.plan()[0] == 200
    assert snapshot(folder) == before


def test_a_plan_equals_the_page_of_recipes_plan(served):
    status, _, text = served.plan()
    assert status == 200
    assert "recipes plan llama3_8b --gpu h100 --gpus 16 --seq 8192 --gbs 64 --precision bf16" in text
    assert "Content-Security-Policy" in text
    other = served.plan(gpu="b200")[2]
    assert "B200" in other
    assert "B200" not in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "llama9_8b"}, "did you mean"),
        ({"gpu": "h1000"}, "did you mean"),
        ({"gpus": "0"}, "2,147,483,647, not 0"),
        ({"gpus": "-8"}, "not -8"),
        ({"gpus": "1e3"}, "whole number"),
        ({"gpus": "9" * 19}, "not 9"),
        ({"gpus": ""}, "which needs a number of GPUs"),
        ({"seq": "x"}, "--seq must be a whole number"),
        ({"precision": "fp3"}, "there is no precision"),
        ({"gbs": "0"}, "--gbs must be between 1 and"),
        ({"model": ""}, "the model name is empty"),
        ({"model": "/etc/passwd"}, "is a path"),
        ({"model": "../config.json"}, "is a path"),
        ({"model": "<img src onerror>"}, "&lt;img src onerror&gt;"),
        ({"model": "<img src=x>"}, "&lt;img src"),
        ({"model": "layers=4,hidden=x"}, "hidden"),
        ({"model": "a\0b"}, "a"),
    ],
    ids=str,
)
def test_invalid_values_get_the_planners_message(served, given, message):
    status, _, text = served.plan(**given)
    assert status == 200
    assert message in text.replace("&#x27;", "'")
    assert 'id="refused"' in text
    assert "<img" not in text
    assert "Traceback" not in text


def test_a_plan_does_not_block_other_requests(served):
    ended = threading.Event()
    answers = []

    def large():
        answers.append(served.plan(model="llama31_405b", gpus="4096", gbs="1024")[0])
        ended.set()

    thread = threading.Thread(target=large)
    thread.start()
    during = 0
    while not ended.is_set():
        served.json("runs.json")
        during += not ended.is_set()
        time.sleep(0.05)
    thread.join()
    assert answers == [200]
    assert during >= 3


def test_concurrent_plans_are_not_mixed_up(served):
    texts = {}

    def ask(gpus):
        texts[gpus] = served.plan(gpus=str(gpus))[2]

    threads = [threading.Thread(target=ask, args=(gpus,)) for gpus in (8, 24, 32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(f"--gpus {gpus} " in text for gpus, text in texts.items())
    assert len(texts) == 3


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 40_000 + b"\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET /{token}/plan?model=%ff%fe HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"POST /{token}/plan HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999\r\n\r\n",
        b"GET /{token}/nothing HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET /{token}/../../etc/passwd HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    ],
    ids=["long", "nonsense", "bytes", "body", "nothing", "path"],
)
def test_malformed_requests_do_not_stop_the_server(served, sent):
    with closing(socket.create_connection(("127.0.0.1", served.port), timeout=30)) as connection:
        connection.sendall(sent.replace(b"{token}", served.token.encode()))
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert b" 200 " not in answer.partition(b"\r\n")[0]
    assert b"Traceback" not in answer
    assert b"root:" not in answer
    assert served.ask("runs.json")[0] == 200


def test_the_token_is_not_logged(served, folder):
    served.ask("nothing")
    served.ask("plan?model=%ff")
    assert served.token not in served.errors
    assert "Traceback" not in served.errors
    process = Path(f"/proc/{served.process.pid}")
    assert served.token not in (process / "cmdline").read_text() + (process / "environ").read_text()
    found_in = subprocess.run(["grep", "-rl", served.token, str(folder.parent)], capture_output=True, text=True).stdout
    assert found_in == ""


def test_ctrl_c_stops_the_server_and_frees_the_port(folder):
    with serving(folder) as first:
        assert first.interrupt() == 0
        assert "stopped" in first.errors
        assert "Traceback" not in first.errors
        with serving(folder, "--port", str(first.port)) as second:
            assert second.port == first.port
            assert second.token != first.token
            assert second.ask(f"/{first.token}/")[0] == 403
            third = subprocess.run(
                [sys.executable, "-m", "superpod.cli", "ui", "--port", str(second.port)], capture_output=True, text=True
            )
            assert third.returncode == 2
            assert f"port {second.port} is in use" in third.stderr


def test_empty_and_missing_folders_of_runs(tmp_path):
    with serving(tmp_path / "none") as served:
        assert "does not exist" in served.json("runs.json")["problem"]
        assert served.plan()[0] == 200
        (tmp_path / "none").mkdir()
        for _ in range(30):
            if (rows := served.json("runs.json")) == {"runs": []}:
                break
            time.sleep(0.2)
        assert rows == {"runs": []}


def test_stdout_that_is_a_file_is_refused(tmp_path):
    command = [sys.executable, "-m", "superpod.cli", "ui"]
    with (tmp_path / "out.txt").open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "standard output is a file" in done.stderr
    assert (tmp_path / "out.txt").read_text() == ""


@pytest.mark.parametrize("port", ["-1", "70000"])
def test_an_invalid_port_is_refused(recipes_cli, port):
    done = recipes_cli("ui", "--port", port)
    assert done.returncode == 2
    assert "between 0 and 65535" in done.stderr
