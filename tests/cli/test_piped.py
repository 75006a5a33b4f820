"""Output to a pipe or a file is not wrapped: each table row is one line."""

import pytest

from superpod.runtime.runs.run_folder import RunFolder

ONE = ("llama3_8b", "--gpu", "h100", "--nodes", "1")


@pytest.fixture
def piped(recipes_cli):
    """Run a command with stdout connected to a pipe and no width in its environment; returns the lines."""

    def call(*words, **more):
        done = recipes_cli(*words, env={"COLUMNS": ""}, **more)  # streams.prepare removes an empty value
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return call


@pytest.mark.parametrize(
    "words",
    [
        ("list",),
        ("list", "llama3"),
        ("plan", *ONE),
        ("plan", *ONE, "--top", "20"),
        ("fit", "--gpu", "h100", "--gpus", "8"),
        ("cost", *ONE, "--tokens", "1T"),
        ("explain", *ONE),
        ("memory", *ONE),
        ("check", "llama3_8b_pretrain_h100_bf16"),
        ("doctor",),
    ],
    ids=" ".join,
)
@pytest.mark.slow
def test_a_pipe_gets_the_lines_of_a_very_wide_terminal(words, piped, recipes_cli):
    wide = recipes_cli(*words, env={"COLUMNS": "9000"})
    assert piped(*words) == wide.stdout.splitlines()


def test_a_long_path_in_a_report_is_not_wrapped(piped, tmp_path):
    run = RunFolder.create(tmp_path / ("long " * 20), "tiny_llama3", facts={"note": "x" * 300}, recipe_lines=[])
    lines = piped("report", str(run.path))
    assert any(str(run.path) in line for line in lines)


def test_columns_wraps_output_to_a_pipe(recipes_cli):
    """`watch recipes plan ...` sets COLUMNS for its pipe."""
    lines = recipes_cli("plan", *ONE, env={"COLUMNS": "80"}).stdout.splitlines()
    assert len(lines) > len(recipes_cli("plan", *ONE, env={"COLUMNS": "9000"}).stdout.splitlines())
