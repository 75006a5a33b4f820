"""`recipes status --watch` in a pseudo-terminal, and without a terminal."""

import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import contextmanager

import pytest

from tests.conftest import environment_of
from tests.reports.growing_run import GrowingRun
from tests.slurm.slurm_runs import snapshot

LEFT = "\x1b[?1049l"
"""Escape sequence that leaves the alternate screen."""


class Terminal:
    """A command that runs in its own pseudo-terminal."""

    def __init__(self, words, columns, lines, env):
        self.main, side = pty.openpty()
        self.resize(columns, lines)
        self.before = termios.tcgetattr(self.main)
        environ = {k: v for k, v in environment_of(env).items() if k not in ("COLUMNS", "LINES")}
        command = [sys.executable, "-m", "superpod.cli", *map(str, words)]
        self.process = subprocess.Popen(
            command, stdin=side, stdout=side, stderr=side, env=environ, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(side)
        self.raw = ""

    @property
    def text(self):
        """Return the output without escape sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw)

    def resize(self, columns, lines):
        fcntl.ioctl(self.main, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys):
        os.write(self.main, keys)

    def until(self, pattern, since=0, limit_s=180):
        """Read until the text after `since` matches; return the match."""
        end = time.monotonic() + limit_s
        while not (match := re.compile(pattern).search(self.text, since)):
            assert time.monotonic() < end, self.text[-3000:]
            if select.select([self.main], [], [], 0.2)[0]:
                try:
                    self.raw += os.read(self.main, 65536).decode(errors="replace")
                except OSError:
                    break
        assert match, self.text[-3000:]
        return match

    def end(self):
        """Wait for the command and return its exit code."""
        limit = time.monotonic() + 120
        while (ready := select.select([self.main], [], [], 0.2)[0]) or self.process.poll() is None:
            assert time.monotonic() < limit, self.text[-3000:]
            if not ready:
                continue
            try:
                self.raw += os.read(self.main, 65536).decode(errors="replace")
            except OSError:
                break
        return self.process.wait(timeout=30)


@contextmanager
def terminal(*words, columns=100, lines=40, env=None):
    shown = Terminal(words, columns, lines, {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **(env or {})})
    try:
        yield shown
    finally:
        shown.process.kill()
        shown.process.wait()
        os.close(shown.main)


@pytest.fixture
def growing(tmp_path):
    run = GrowingRun(tmp_path / "runs")
    run.grow(50)
    run.beat(behind=[3], silent=[5])
    return run


def test_the_page_follows_a_run_until_ctrl_c(tmp_path, growing):
    before = snapshot(tmp_path / "runs")
    with terminal("status", "--watch", "--every", "0.3", "--runs", tmp_path / "runs") as shown:
        shown.until("at step 50")
        shown.until("slowest: rank 3")
        shown.until("rank 5")
        shown.until("step 50 consumed")
        shown.until(r"tokens/s/GPU: \d+ at step 50")
        shown.until("[\u2801-\u28ff]")
        assert snapshot(tmp_path / "runs") == before
        growing.grow(7, "new words")
        shown.until("at step 57")
        shown.until("step 57 new words")
        assert not termios.tcgetattr(shown.main)[3] & termios.ECHO
        shown.press(b"\x03")
        assert shown.end() == 0
        assert LEFT in shown.raw
        assert "\x1b[?25h" in shown.raw[-200:]  # the cursor
        assert termios.tcgetattr(shown.main) == shown.before
        assert "Traceback" not in shown.text


def test_ranks_of_a_rehearsal_are_shown_without_gpus(tmp_path):
    GrowingRun(tmp_path / "runs", rehearsal=True).grow(50)
    with terminal("status", "--watch", "--runs", tmp_path / "runs") as shown:
        shown.until(r"tokens/s/rank: \d+ at step 50")
        assert "tokens/s/GPU" not in shown.text


@pytest.mark.parametrize("how", ["q", "kill"])
def test_the_terminal_is_restored(tmp_path, growing, how):
    with terminal("status", growing.path, "--watch", "--every", "0.3") as shown:
        shown.until("at step 50")
        if how == "q":
            shown.press(b"q")
        else:
            shown.process.send_signal(signal.SIGTERM)
        assert shown.end() == (0 if how == "q" else 143)
        assert LEFT in shown.raw
        assert termios.tcgetattr(shown.main) == shown.before


def test_a_narrow_ascii_terminal_and_a_resize(tmp_path, growing):
    words = ("status", "--watch", "--every", "0.3", "--runs", tmp_path / "runs")
    with terminal(*words, columns=40, lines=24, env={"LC_ALL": "C"}) as shown:
        shown.until("at step 50")
        shown.until(r"\*\*\*")
        assert shown.raw.isascii()
        assert max(map(len, re.split(r"[\r\n]+", shown.text))) <= 40
        at = len(shown.text)
        shown.resize(120, 40)
        shown.until(r"run +state +step +loss", since=at)
        shown.press(b"\x03")
        assert shown.end() == 0


def test_keys_select_one_of_several_runs(tmp_path, growing):
    other = GrowingRun(tmp_path / "runs", "zother")
    other.grow(9)
    with terminal("status", "--watch", "--every", "0.3", "--runs", tmp_path / "runs") as shown:
        shown.until(r"─ \w+/")
        at = len(shown.text)
        for key in (b"\x1b[B", b"\x1b[A", b"\x1b[B"):
            shown.press(key)
            time.sleep(0.5)
        shown.until(r"─ tiny_llama3/", since=at)
        shown.until(r"─ zother/", since=at)
        shown.press(b"x\x1b[Aq")  # typed ahead
        assert shown.end() == 0


def test_a_run_that_is_removed_while_it_is_watched(tmp_path, growing):
    with terminal("status", growing.path, "--watch", "--every", "0.3") as shown:
        shown.until("at step 50")
        (growing.path / "run.json").write_text('{"recipe"')
        shown.until("unreadable")
        shutil.rmtree(tmp_path / "runs")
        shown.until("is missing")
        shown.press(b"\x03")
        assert shown.end() == 0
        assert "Traceback" not in shown.text


def test_a_pipe_gets_the_table_once_with_a_note(recipes_cli, tmp_path, growing):
    done = recipes_cli("status", "--watch", "--runs", tmp_path / "runs")
    assert done.returncode == 0
    assert "50/200" in done.stdout
    assert "--watch needs a terminal" in done.stderr
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--json",), "--watch and --json cannot be combined"),
        (("--exit-code",), "--watch and --exit-code cannot be combined"),
        (("--every", "0"), "between 0.2 and 3600"),
        (("--every", "nan"), "between 0.2 and 3600"),
        (("5",), "--watch --every 5"),
    ],
    ids=["json", "exit-code", "zero", "nan", "number"],
)
def test_options_that_contradict_watch_are_refused(recipes_cli, tmp_path, words, message):
    done = recipes_cli("status", "--watch", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_narrow_terminal_gets_lines_instead_of_a_table(tmp_path, growing):
    with terminal("status", "--runs", tmp_path / "runs", columns=60) as shown:
        assert shown.end() == 0
        assert max(map(len, shown.text.split("\r\n"))) <= 60
        assert re.search(r"step 50/200, loss \d\.\d{4}", shown.text)
