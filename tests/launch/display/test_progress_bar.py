"""Progress output with and without a terminal, and memory checks before NeMo is imported."""

import contextlib
import io
import json
import os
import pty
import subprocess
import sys
import time

import pytest
from rich.console import Console

from superpod.common import progress_file
from superpod.common.json_files import append_line
from superpod.errors import UserError
from superpod.launch import preflight
from superpod.launch.display import progress_bar
from superpod.launch.display.progress_bar import StepProgress, spinner
from superpod.requests.request import Request
from superpod.runtime.runs.run_folder import Attempt, RunFolder


def plain() -> Console:
    return Console(file=io.StringIO(), width=200)


def shown(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_without_a_terminal_each_stage_is_a_line(monkeypatch):
    monkeypatch.setattr(progress_bar, "POLL_S", 0.4)
    console = plain()
    with spinner(console, "generating with [step 3]"):
        command = "from superpod.common import progress_file; progress_file.note('importing NeMo')"
        subprocess.run([sys.executable, "-c", command], check=True)
        time.sleep(1.3)
    lines = shown(console)
    assert lines[0] == "generating with [step 3]"
    assert [line.partition(" (")[0] for line in lines[1:]] == ["... generating with [step 3]: importing NeMo"], lines
    time.sleep(0.6)
    assert shown(console) == lines, "no output after the wait"


def test_on_a_terminal_a_wait_shows_seconds_and_is_erased(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")  # TERM=dumb disables the spinner
    sink = io.StringIO()
    console = Console(file=sink, force_terminal=True, width=100)
    with spinner(console, "converting"):
        progress_file.note("importing NeMo")
        time.sleep(1.3)
    text = sink.getvalue()
    assert "converting: importing NeMo (1 s)" in text
    assert text.rstrip().endswith("\x1b[2K") or text.endswith("\x1b[?25h") or "\x1b[2K" in text


@pytest.mark.parametrize(("term", "shown_as"), [("xterm", True), ("dumb", False)])
def test_a_dumb_terminal_gets_plain_ascii_lines(term, shown_as, monkeypatch):
    monkeypatch.setenv("TERM", term)
    sink = io.StringIO()
    with spinner(Console(file=sink, force_terminal=True, width=100), "converting"):
        time.sleep(0.4)
    assert ("\x1b[" in sink.getvalue()) is shown_as
    assert sink.getvalue().isascii()


@pytest.mark.parametrize(("locale", "plain_ones"), [("C", True), ("C.UTF-8", False)])
def test_a_terminal_in_the_c_locale_gets_ascii_only(locale, plain_ones):
    """Uses a real terminal, because Python assumes UTF-8 for LANG=C."""
    terminal, ours = pty.openpty()
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "PYTHON"))} | {"LANG": locale}
    command = [sys.executable, "-c", "from superpod.cli import streams; streams.prepare(); print(chr(0x2588))"]
    process = subprocess.Popen(command, stdout=ours, stderr=ours, env=environ)
    os.close(ours)
    printed = b""
    with contextlib.suppress(OSError):  # EIO: the command has ended
        while True:
            piece = os.read(terminal, 65536)
            if not piece:
                break
            printed += piece
    assert process.wait() == 0, printed
    assert printed.isascii() is plain_ones
    os.close(terminal)


def test_a_note_without_a_watcher_is_ignored(monkeypatch):
    monkeypatch.delenv(progress_file.VARIABLE, raising=False)
    progress_file.note("importing NeMo")
    with progress_file.watch() as stage:
        assert stage() == ""


def test_the_activity_of_rank_0_is_shown_before_step_1(tmp_path, monkeypatch):
    run = RunFolder.create(tmp_path, "toy", facts={}, recipe_lines=[])
    run.new_attempt()
    phase: dict[str, str] = {}
    monkeypatch.setattr(Attempt, "heartbeat", lambda self, rank=0: phase)
    console = plain()
    with StepProgress(console, run, 10) as steps:
        for name in ("", "start", "train", "train"):
            phase["phase"] = name
            steps._next_update = 0.0
            steps.tick()
        append_line(run.path / "metrics.jsonl", {"step": 1, "loss": 2.0, "t": 1.0, "attempt": "001"})
        steps.tick()
    assert shown(console)[:3] == [*progress_bar.STARTUP_ACTIVITIES.values()]
    assert len(shown(console)) == 4
    assert shown(console)[3].startswith("step 1/10")


@pytest.mark.skipif(preflight.may_have_gpu(), reason="this machine has a GPU")
def test_a_run_too_large_for_this_machine_is_refused_before_nemo_is_imported(recipes_cli, tmp_path):
    done = recipes_cli("run", "llama3_70b_pretrain_h100_bf16", "--runs", tmp_path, python=("-X", "importtime"))
    assert done.returncode == 2
    assert "needs 32 processes and at least" in done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")}
    assert "typer" in imported
    assert not imported & {"torch", "nemo", "lightning", "megatron"}


def test_a_run_with_overrides_is_not_refused_by_the_plan():
    preflight.require_planned_memory(Request("llama3_70b_pretrain_h100_bf16", ("model.config.num_layers=1",)))


@pytest.mark.skipif(preflight.may_have_gpu(), reason="this machine has a GPU")
def test_frozen_weights_of_an_adapter_count_two_bytes():
    with pytest.raises(UserError) as trained:
        preflight.require_planned_memory(Request("llama3_70b_sft_h100_bf16"))
    with pytest.raises(UserError) as frozen:
        preflight.require_planned_memory(Request("llama3_70b_lora_h100_bf16"))
    gib = [int(str(e.value).split("at least ")[1].split(" GiB")[0].replace(",", "")) for e in (trained, frozen)]
    assert gib[0] > 5 * gib[1], json.dumps(gib)
