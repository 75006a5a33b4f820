"""Test functions in forked processes."""

import atexit
import functools
import os
import sys

from superpod.runtime.processes import forked


def exit_code(call):
    return os.waitstatus_to_exitcode(os.waitpid(forked.fork(call), 0)[1])


def write(path, text):
    forked.redirect_output(path)
    print(text, file=sys.__stdout__, flush=True)  # pytest has replaced sys.stdout


def fail(path):
    forked.redirect_output(path)
    sys.stderr = sys.__stderr__
    raise KeyboardInterrupt


def test_output_goes_to_the_file(tmp_path):
    assert exit_code(functools.partial(write, tmp_path / "log", "trained")) == 0
    assert (tmp_path / "log").read_text() == "trained\n"


def test_any_exception_ends_the_process_with_its_traceback(tmp_path):
    assert exit_code(functools.partial(fail, tmp_path / "log")) == 1
    assert (tmp_path / "log").read_text().endswith("KeyboardInterrupt\n")


def test_exit_handlers_of_this_process_do_not_run(tmp_path):
    done = tmp_path / "handler"
    atexit.register(done.touch)
    try:
        assert exit_code(lambda: None) == 0
        assert not done.exists()
    finally:
        atexit.unregister(done.touch)
