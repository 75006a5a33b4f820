"""Malicious input is refused with a message and exit code 2; `benchmarks/hostile_inputs.py` measures the time."""

import importlib.util

import pytest

from tests.conftest import ROOT

spec = importlib.util.spec_from_file_location("hostile_inputs", ROOT / "benchmarks" / "hostile_inputs.py")
assert spec is not None
assert spec.loader is not None
hostile = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hostile)

COMMANDS = hostile.command_lines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile")
    hostile.prepare(path)
    return path


def test_the_commands_are_distinct():
    assert len(set(COMMANDS)) == len(COMMANDS) >= 110


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=pytest.mark.long if i % 3 else pytest.mark.slow) for i, c in enumerate(COMMANDS)],
    ids=lambda words: repr(" ".join(words))[:60],
)
def test_hostile_input_is_refused_with_a_message(command, folder):
    refuses(command, folder)


@pytest.mark.nemo
@pytest.mark.long
@pytest.mark.parametrize("command", hostile.NEEDS_NEMO, ids=lambda words: repr(" ".join(words))[:60])
def test_hostile_input_that_needs_nemo_is_refused_with_a_message(command, folder):
    refuses(command, folder)


def refuses(command, folder):
    before = sorted(path.name for path in folder.iterdir())
    done = hostile.refused(command, folder)
    assert not hostile.what_is_wrong(done), done.stderr[-1500:]
    assert sorted(path.name for path in folder.iterdir()) == before, "it left files behind"
