"""The output of a child process is forwarded without secrets, and remaining processes do not block."""

import subprocess
import sys
import time

from superpod.launch import redacted_output

PRINTS = """
import os, subprocess, sys
print("begins with hf_abcdefghijklmnop", flush=True)
print("AWS_SECRET_ACCESS_KEY=abc123def456", file=sys.stderr)
print("step 3 of 10", flush=True)
sys.stdout.write("no line break, token=ghp_abcdefghij")
"""


def child(code: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", code]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")


def test_both_streams_are_forwarded_without_secrets(capsys):
    process = child(PRINTS)
    with redacted_output.forward_output(process):
        assert process.wait(60) == 0
    shown = capsys.readouterr()
    assert shown.out == "begins with <redacted>\nstep 3 of 10\nno line break, token=<redacted>"
    assert shown.err == "AWS_SECRET_ACCESS_KEY=<redacted>\n"


def test_remaining_processes_do_not_block(capsys, monkeypatch):
    monkeypatch.setattr(redacted_output, "END_S", 0.5)
    process = child("import subprocess; p = subprocess.Popen(['sleep', '20']); print(p.pid, flush=True)")
    began = time.monotonic()
    with redacted_output.forward_output(process):
        process.wait(60)
    assert time.monotonic() - began < 15
    subprocess.run(["kill", capsys.readouterr().out.strip()], check=True)
