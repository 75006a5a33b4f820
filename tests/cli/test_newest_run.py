"""`last`, a recipe's folder and a folder of runs select the newest run in every verb."""

import json
import os

import pytest

from superpod.errors import UserError
from superpod.reports.runs import run_list
from superpod.runtime.runs.run_folder import RunFolder

VERBS = (("report", "--json"), ("history", "--json"), ("status", "--json"), ("ckpt", "list"))


@pytest.fixture
def two_runs(tmp_path, monkeypatch):
    """An older run of one recipe, and a newer one of another."""
    monkeypatch.chdir(tmp_path)
    runs = []
    for name, time in (("tiny_llama3", "20260101T000000Z-aa"), ("tiny_llama3_sft", "20260102T000000Z-bb")):
        made = RunFolder.create(tmp_path / "runs", name, facts={}, recipe_lines=["a = 1"])
        runs.append(made.path.rename(made.path.with_name(time)))
        (runs[-1] / "checkpoints").mkdir(exist_ok=True)
    return runs


@pytest.mark.parametrize(("word", "which"), [("last", 1), ("runs", 1), ("runs/tiny_llama3", 0)])
def test_the_newest_run_is_selected(word, which, two_runs):
    assert str(two_runs[which]).endswith(run_list.resolve_run(word))


def test_other_paths_are_returned_unchanged(two_runs, tmp_path):
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    for word in (str(two_runs[0]), "sweep", "nowhere", "host:/elsewhere", str(two_runs[0] / "checkpoints")):
        assert run_list.resolve_run(word) == word


def test_last_without_any_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no run in runs"):
        run_list.resolve_run("last")


@pytest.mark.parametrize(("verb", "more"), VERBS, ids=[verb for verb, _ in VERBS])
def test_verbs_accept_last_and_print_the_run(verb, more, two_runs, recipes_cli, tmp_path):
    words = [verb, more, "last"] if verb == "ckpt" else [verb, "last", more]
    done = recipes_cli(*words, cwd=tmp_path)
    assert "Traceback" not in done.stderr
    assert f"last is runs/tiny_llama3_sft/{two_runs[1].name}" in " ".join(done.stderr.split())
    if more == "--json":
        assert done.returncode == 0, done.stderr
        json.loads(done.stdout)


def test_metrics_that_are_a_pipe_are_not_read(tmp_path, recipes_cli):
    run = RunFolder.create(tmp_path / "runs", "tiny_llama3", facts={}, recipe_lines=["a = 1"])
    os.mkfifo(run.path / "metrics.jsonl")
    done = recipes_cli("report", run.path)
    assert "metrics.jsonl is not a regular file" in done.stderr


@pytest.mark.parametrize("make", [lambda p: p.write_text(""), lambda p: os.mkfifo(p), lambda p: p.symlink_to(p)])
def test_last_refuses_runs_that_are_not_a_folder(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "runs")
    with pytest.raises(UserError, match="runs is not a folder"):
        run_list.resolve_run("last")


@pytest.mark.parametrize(
    ("words", "code"),
    [(("status", "last", "--runs", "elsewhere", "--json"), 0), (("top-up", "last", "--runs", "elsewhere"), 2)],
    ids=["status", "top-up"],
)
def test_last_is_the_newest_run_in_the_given_folder(words, code, two_runs, recipes_cli, tmp_path):
    made = RunFolder.create(tmp_path / "elsewhere", "tiny_mixtral", facts={}, recipe_lines=["a = 1"])
    done = recipes_cli(*words, cwd=tmp_path)
    assert done.returncode == code, done.stderr  # top-up: a run without jobs cannot be topped up
    assert f"last is elsewhere/tiny_mixtral/{made.path.name}" in " ".join(done.stderr.split())
    if not code:
        assert [row["recipe"] for row in json.loads(done.stdout)] == ["tiny_mixtral"]


@pytest.mark.parametrize("verb", ["status", "top-up"])
def test_last_in_a_folder_without_runs_is_refused(verb, two_runs, recipes_cli, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    done = recipes_cli(verb, "last", "--runs", "elsewhere", cwd=tmp_path)
    assert done.returncode == 2
    assert "there is no run in elsewhere" in done.stderr
