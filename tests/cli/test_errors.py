"""A user's mistake is one clear message and exit code 2, with no traceback, before NeMo is imported."""

import os
import shlex
import signal
import subprocess
import sys

import pytest

from superpod.errors import counted, did_you_mean
from tests.cli.planning.small_plans import SMALL

GPUS = ("--gpu", "h100", "--gpus", "8")


@pytest.mark.parametrize(
    ("words", "says", "hint"),
    [
        (["show", "tiny_lama3"], "there is no recipe 'tiny_lama3'", "tiny_llama3"),
        (["run", "tiny_lama3"], "there is no recipe 'tiny_lama3'", "tiny_llama3"),
        (["run", 'it\'s; a "name" $(id)'], "there is no recipe", "recipes list"),
        (["run", "tiny_llama3", "--data", "no such folder"], "no such folder", ""),
        (["run", "llama3_70b_pretrain_h100_bf16", "--nodes", "9999"], "must be between 1 and 8,192", ""),
        (["run", "tiny_llama3", "--resume", "last"], "no run of tiny_llama3", "without --resume"),
        (["run", "tiny_llama3", "--resume", "/nowhere"], "/nowhere is not a run folder", ""),
        (["report", "/nowhere"], "/nowhere does not exist", ""),
        (["report", "nothere.log"], "nothere.log does not exist", "folder of logs"),
        (["frobnicate"], "No such command 'frobnicate'", ""),
        (["run"], "Missing argument", ""),
        (["run", "tiny_llama3", "--daat", "x"], "No such option", ""),
        (["plan", "llama3_8c", "--gpu", "h100", "--gpus", "8"], "there is no model 'llama3_8c'", ""),
        (["plan", "llama3_8c", "--gpu", "h100", "--gpus", "8"], "did you mean llama3_8b or", ""),
        (["plan", "llama3_8b"], "which needs a GPU type", ""),
        (["plan", "llama3_8b", "--gpu", "h1000", "--gpus", "8"], "there is no node 'h1000'", ""),
        (["plan", "llama3_8b", "--gpu", "h100"], "which needs a number of GPUs", ""),
        (
            ["plan", "llama3_8b", "--gpu", "h100", "--gpus", "0"],
            "--gpus must be between 1 and 2,147,483,647, not 0",
            "--gpus 8",
        ),
        (["plan", *SMALL[:-2], "--gbs", "-5"], "not -5", ""),
        (["plan", *SMALL, "--precision", "fp7"], "there is no precision 'fp7'", ""),
        (["plan", *SMALL, "--fix", "tq=3"], "the search cannot fix the layout key 'tq'", ""),
        (["plan", *SMALL, "--memory-cap", "nan"], "--memory-cap must be greater than 0 GiB and finite, not nan", ""),
        (["plan", *SMALL, "--from", "no such file"], "no such file does not exist", "a DeepSpeed JSON"),
        (["plan", *SMALL, "--hardware", "/nowhere.toml"], "/nowhere.toml does not exist", "configuration file"),
        (["plan", *SMALL, "--option", "moment=bf16"], "there is no option 'moment'", ""),
        (["plan", *SMALL, "--option", "moments=9"], "moments", ""),
        (["plan", *SMALL, "--option", "deepep=tru"], "must be true or false, not 'tru'", "did you mean true?"),
        (["plan", *SMALL, "--fix", "tp=two"], "--fix: tp must be an integer", "at least 1, such as tp=1"),
        (["plan", *SMALL, "--trace", "s.txt"], "ending with .json", "use --trace s.json"),
        (["plan", *SMALL, "--option", "moments"], "--option moments has no value", "moments=fp32"),
        (["plan", *SMALL, "--memory-cap", "1e308"], "not 1e+308", "h100 has 79.2 GiB"),
        (
            ["plan", *SMALL, "--memory-cap", "999"],
            "the memory cap of 999 GiB exceeds the memory of h100, 79.2 GiB",
            "79.2",
        ),
        (["plan", *SMALL, "--option", "memory_cap=999."], "the memory cap of 999 GiB exceeds the memory of h100", ""),
        (
            ["plan", "llama3_8b", "--gpu", "a100", "--gpus", "8", "--precision", "fp8cs"],
            "does not support fp8cs",
            "supported: fp32",
        ),
        (["plan", *SMALL, "--seq", "99999999999999"], "between 1 and 2,147,483,647, not 99999999999999", ""),
        (["plan", ""], "an argument is empty", "leave it out"),
        (
            ["export", "tiny_llama3", "--to", "/proc/my_recipe.py"],
            "/proc/my_recipe.py cannot be written",
            "another folder",
        ),
        (["check", "llama3_8b", "--gpu", "h100", "--nodes", "1", "--layout", "tp=x"], "tp must be an integer", ""),
        (["check", "llama3_8b", "--gpu", "h100", "--nodes", "1", "--layout", "tp=1,tp=2"], "tp twice", ""),
        (["check", "llama3_8b_pretrain_h100_bf15"], "llama3_8b_pretrain_h100_bf16", ""),
        (["memory", "llama3_8b", "--gpu", "h100", "--nodes", "1", "--layout", "tp=3"], "tp 3", ""),
        (["cost", "tiny_llama3", "--tokens", "lots"], "--tokens must be a number, not 'lots'", ""),
        (["scale", "llama3_8b", "--gpu", "h100", "--gpus", "8,,x"], "not '8,,x'", ""),
        (["predict", "--from", "none.csv", "--out", "o.csv"], "none.csv does not exist", "a CSV file"),
        (
            ["plan", "layers=2,hidden=64,heads=3,vocab=10", "--gpu", "h100", "--gpus", "8"],
            "hidden 64 must be divisible by heads 3",
            "",
        ),
        (["plan", "layers=2,hidden", *GPUS], "hidden", ""),
        (["why", ""], "an argument is empty", "a shell variable may be unset"),
        (["ckpt", "list", ""], "an argument is empty", "leave it out"),
        (["run", "tiny_llama3", "--data", ""], "--data is empty", "leave it out"),
        (["report", "--plot=", "runs"], "--plot is empty", "leave it out"),
        (["plan", *SMALL, "--fix", "tp=1", "--fix=pp=1"], "--fix is given twice", "pass it once"),
        (["check", *SMALL, "--layout", "tp=1", "--layout", "pp=1"], "--layout is given twice", "pass it once"),
        (
            ["ckpt", "prune", "x", "--keep", "1", "--keep", "2", "--keep", "3"],
            "--keep is given 3 times",
            "pass it once",
        ),
        (["check", "{}", *GPUS], "the model is JSON text, not a file", "config.json"),
        (["check", "", *GPUS], "an argument is empty", "leave it out"),
        (["check", ".", *GPUS], "the folder . has no config.json", "or the file"),
    ],
)
def test_a_user_error_is_one_message_and_exit_code_2(words, says, hint, recipes_cli, tmp_path):
    done = recipes_cli(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())
    assert hint in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_repeatable_options_and_option_values_may_be_repeated(recipes_cli, tmp_path):
    done = recipes_cli("plan", *SMALL, "--option", "moments=bf16", "--option", "offload=0", "--fix", "--fix")
    assert "is given twice" not in done.stderr
    done = recipes_cli("run", "tiny_llama3", "--resume", "x", "--", "--resume", "y", cwd=tmp_path)
    assert "is given twice" not in done.stderr


def test_predict_into_a_missing_folder_names_the_folder(recipes_cli, tmp_path):
    (tmp_path / "rows.csv").write_text("model,gpu,gpus,tp\nllama3_8b,h100,8,2\n")
    done = recipes_cli("predict", "--from", "rows.csv", "--out", "none/out.csv", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --out none/out.csv: folder none does not exist\n")


@pytest.mark.parametrize("module", ["superpod.errors", "superpod.cli.app", "typer"])
def test_an_interrupt_during_imports_prints_no_traceback(module, recipes_cli, tmp_path):
    interrupt = f"""
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
"""
    (tmp_path / "sitecustomize.py").write_text(interrupt)
    done = recipes_cli("list", env={"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stderr, done.stdout) == (130, "error: interrupted\n", "")


PLANNED = "llama3_8b --gpu h100 --nodes 1"


@pytest.mark.parametrize("reader", ["head -n 1", "true"])
@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("list", 0),
        ("list --json", 0),
        (f"plan {PLANNED}", 0),
        (f"memory {PLANNED}", 0),
        ("--help", 0),
        ("plan --help", 0),
        ("list nothing_like_it", 2),
    ],
)
@pytest.mark.slow
def test_a_closed_pipe_is_not_an_error(words, code, reader):
    """rich and Typer each exit with 1 in this case, and rich replaces stdout by /dev/null."""
    script = f"{shlex.quote(sys.executable)} -m superpod.cli {words} | {reader} >/dev/null; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == code
    assert "internal error" not in done.stderr
    assert (done.stderr == "") == (code == 0)


def test_a_broken_pipe_to_a_child_is_an_internal_error(monkeypatch, capsys):
    import superpod.cli
    from superpod.cli import app

    def broken():
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(app, "app", broken)
    with pytest.raises(SystemExit) as ended:
        superpod.cli.main()
    assert ended.value.code == 1
    assert "internal error" in capsys.readouterr().err


def test_check_keeps_its_exit_code_after_a_closed_pipe():
    script = f"{shlex.quote(sys.executable)} -m superpod.cli check llama3_8b --gpu h100 --nodes 1 --layout tp=3"
    piped = f"{script} | true; exit ${{PIPESTATUS[0]}}"
    for unbuffered in ("", "1"):  # the pipe breaks at the first line, or when all is flushed at the end
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(["bash", "-c", piped], capture_output=True, timeout=120, env=environment)
        assert done.returncode == 2, unbuffered


def test_duplicate_suggestions_are_dropped():
    assert did_you_mean("tiny_lama3", ["tiny_llama3", "tiny_llama3"]) == "did you mean tiny_llama3?"


def test_a_path_without_permission_is_a_user_error(recipes_cli, tmp_path):
    done = recipes_cli("predict", "--from", str(tmp_path), "--out", "/proc/rows.csv", cwd=tmp_path)
    assert done.returncode == 2
    assert "internal error" not in done.stderr


def test_counted_adds_a_plural_s():
    assert [counted(number, "node") for number in (1, 2, 1024)] == ["1 node", "2 nodes", "1,024 nodes"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_imports_is_reported_without_arguments(number, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, os, signal\n"
        "class End:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == 'superpod.cli.app': os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, End())\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-m", "superpod.cli", "plan", "llama3_8b", "--option", "hf_token=x"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environ)
    assert (done.returncode, done.stdout) == (128 + number, "")
    assert done.stderr == f"error: recipes plan was terminated by {number.name}\n"


@pytest.mark.parametrize("what", ["a file", "a link to nothing"])
def test_ui_refuses_runs_that_are_not_a_folder(what, recipes_cli, tmp_path):
    if what == "a file":
        (tmp_path / "runs").write_text("root:x:0:0\n")
    else:
        (tmp_path / "runs").symlink_to("nowhere")
    done = recipes_cli("ui", "--runs", "runs", cwd=tmp_path)
    assert done.returncode == 2
    assert "error: --runs runs is not a folder" in done.stderr
    assert "  next: " in done.stderr
