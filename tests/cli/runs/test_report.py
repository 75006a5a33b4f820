"""`recipes report`: runs, external logs, user errors, full disks and missing packages."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from superpod.runtime.runs.run_folder import RunFolder
from tests.cli.planning.small_plans import printed
from tests.reports.report_cases import (
    BRIDGE,
    KILLED_TWICE,
    MEGATRON,
    NEMO,
    NEMO_EVENTS,
    ON_SLURM,
    copied,
    known,
    made_up,
)

WITHOUT = (
    "import sys\nfrom importlib.machinery import PathFinder\nfind = PathFinder.find_spec\n"
    "PathFinder.find_spec = classmethod(lambda c, name, *a: None if name.startswith({!r}) else find(name, *a))\n"
    "sys.argv[0] = 'recipes'\nfrom superpod.cli import main\nmain()\n"
)


def without(package, *words, cwd):
    command = [sys.executable, "-c", WITHOUT.format(package), *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (KILLED_TWICE, ("60 in 3 attempts", "repeated steps 8.15 s", "26.0% of 4.19 min", "none of 2")),
        (ON_SLURM, ("24 in 3 attempts", "repeated steps 1.68 s", "5 saved", "unigram entropy")),
    ],
)
def test_a_real_run_of_three_attempts(recipes_cli, tmp_path, name, says):
    run = copied(name, tmp_path)
    text = printed(recipes_cli, "report", run.path)
    for words in (*says, "step time", "p99", "learning rate", "next", "loss, nats/token", "⠤"):
        assert words in text, words
    assert "None" not in text


def test_a_run_on_gpus_is_compared_with_its_plan_and_a_published_run(recipes_cli, tmp_path):
    text = printed(recipes_cli, "report", made_up(tmp_path).path, env={"COLUMNS": "200"})
    for words in ("MFU ", "HFU ", "989 TFLOP/s", "+20%", "20% slower than planned", "measured) GiB", "published"):
        assert words in text, words
    assert "NVIDIA" in text
    assert "by pipeline stage" in text


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (MEGATRON, ("log of Megatron-LM", "200 in 2 attempts", "MFU 44.8%", "published", "between attempts")),
        (BRIDGE, ("log of Megatron-Bridge", "throughput", "TFLOP/s per GPU", "goodput")),
        (NEMO, ("log of NeMo", "validation loss", "learning rate")),
        pytest.param(NEMO_EVENTS, ("TensorBoard files of NeMo", "grad norm", "goodput"), marks=pytest.mark.nemo),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else "",
)
def test_external_runs(recipes_cli, path, says):
    text = printed(recipes_cli, "report", path, "--gpu", "h100", env={"COLUMNS": "120"})
    for words in (*says, "step time", "loss, nats/token"):
        assert words in text, words


def test_several_runs_in_one_chart_without_color(recipes_cli, tmp_path):
    run = copied(KILLED_TWICE, tmp_path)
    text = printed(recipes_cli, "report", run.path, MEGATRON, BRIDGE, "--compare")
    assert "goodput %" in text
    for line in (f"** {run.recipe} {run.path.name}", f"++ {MEGATRON.name}", f"xx {BRIDGE.name}"):
        assert line in text.splitlines()
    assert "⠤" not in text
    plot = text.partition("loss, nats/token")[2]
    assert {"*", "+", "x"} <= {*plot}


def test_json_has_the_figures_of_every_run(recipes_cli, tmp_path):
    run = copied(ON_SLURM, tmp_path)
    own = json.loads(printed(recipes_cli, "report", run.path, "--json"))
    assert (own["steps"], own["figures"]["attempts"], own["source"]) == (24, 3, "run folder")
    assert sum(own["figures"]["time_s"].values()) == pytest.approx(own["figures"]["wall_s"])
    log = json.loads(printed(recipes_cli, "report", MEGATRON, "--gpu", "h100", "--json"))
    assert log["figures"]["mfu"] == pytest.approx(0.448, abs=0.001)
    assert log["figures"]["planned"]["terms_s"]["compute"] > 0
    both = json.loads(printed(recipes_cli, "report", run.path, MEGATRON, "--json"))
    assert [one["source"] for one in both] == ["run folder", "log of Megatron-LM"]


def test_an_ascii_terminal_gets_ascii(recipes_cli, tmp_path):
    run = copied(KILLED_TWICE, tmp_path)
    text = printed(recipes_cli, "report", run.path, env={"PYTHONIOENCODING": "ascii"})
    assert text.isascii()
    assert "|*" in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("nope",), "nope does not exist"),
        ((".",), "contains runs"),
        (("empty",), "no log"),
        (("a 'note'.txt",), "no training step"),
        (("log.log", "--gpu", "h10"), "did you mean h100"),
        (("log.log", "--html", "page.txt"), "ending with .html"),
        (("log.log", "--html", "nowhere/page.html"), "folder nowhere does not exist"),
        (("log.log", "--html", "a 'note'.html"), "not written by `recipes`"),
        (("log.log", "--plot", "a.png"), "--plot supports only run folders"),
        (("runs/tiny_llama3/queued", "--html", "page.html"), "no run has completed a step yet"),
        (("log.log",) * 8 + ("--html", "page.html"), "between 1 and 7 runs, not 8"),
    ],
    ids=" ".join,
)
def test_user_errors_are_refused(recipes_cli, tmp_path, words, says):
    (tmp_path / "empty").mkdir()
    copied(KILLED_TWICE, tmp_path)
    RunFolder.create(tmp_path / "q", "tiny", facts={}, recipe_lines=[]).path.rename(
        tmp_path / "runs" / "tiny_llama3" / "queued"
    )
    for name in ("a 'note'.txt", "a 'note'.html"):
        (tmp_path / name).write_text("buy milk\n")
    shutil.copy(MEGATRON, tmp_path / "log.log")
    done = recipes_cli("report", *words, cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_stdout_is_reported(unbuffered, tmp_path):
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "superpod.cli", "report", str(BRIDGE)]
        streams = {"stdout": full, "stderr": subprocess.PIPE}
        done = subprocess.run(words, **streams, text=True, cwd=tmp_path, timeout=60, env=environment)
    assert done.returncode == 1
    assert "No space left" in done.stderr
    assert "Exception ignored" not in done.stderr


def test_without_optional_packages_only_plots_are_refused(tmp_path):
    shutil.copytree(NEMO_EVENTS, tmp_path / "tb")
    page = without("bokeh", "report", MEGATRON, "--html", "a.html", cwd=tmp_path)
    assert (page.returncode, "Bokeh, which is not installed" in page.stderr) == (2, True)
    events = without("tensorboard", "report", "tb", cwd=tmp_path)
    assert events.returncode == 2
    assert "tensorboard, which is not installed" in events.stderr
    assert "pip install -c constraints.txt tensorboard" in events.stderr
    plain = without("bokeh", "report", MEGATRON, cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr


def test_nothing_heavy_is_imported(recipes_cli):
    done = recipes_cli("report", MEGATRON, "--gpu", "h100", python=("-X", "importtime"))
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert not loaded & {"torch", "nemo", "bokeh", "tensorboard", "matplotlib", "pandas"}
    assert "typer" in loaded


@pytest.mark.long
@pytest.mark.nemo
@pytest.mark.train
def test_the_report_has_the_time_lost_to_a_killed_rank(recipes_cli, tmp_path):
    """Train, kill a rank after an unsaved step, and train a second attempt."""
    steps = ("trainer.max_steps=8", "log.ckpt.every_n_train_steps=3", "trainer.limit_val_batches=0")
    command = [sys.executable, "-m", "superpod.cli", "run", "tiny_llama3"]
    launcher = subprocess.Popen([*command, *steps], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = _at_step(5, tmp_path / "runs" / "tiny_llama3", launcher)
    os.kill(_rank_of(launcher.pid, 1), signal.SIGKILL)
    assert launcher.wait(300) != 0
    done = recipes_cli("run", "tiny_llama3", "--resume", "last", *steps, cwd=tmp_path, timeout=500)
    assert done.returncode == 0, done.stderr
    figures = json.loads(printed(recipes_cli, "report", run.path, "--json"))["figures"]
    made = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    lost = [one for one in made if one["attempt"] == "001" and one["step"] > run.attempts[1].resume["step"]]
    assert lost
    assert figures["attempts"] == 2
    assert figures["time_s"]["repeated steps"] == pytest.approx(sum(one["step_time_s"] for one in lost))
    assert 0 < known(figures["goodput"]) < 1


def _at_step(step: int, folder: Path, launcher: subprocess.Popen) -> RunFolder:
    end = time.monotonic() + 400
    while time.monotonic() < end and launcher.poll() is None:
        run = RunFolder(next(iter(folder.glob("*-*")), folder))
        if any(line["step"] >= step for line in run.metrics()):
            return run
        time.sleep(0.1)
    raise AssertionError("the run has not come to its step")


def _rank_of(launcher: int, rank: int) -> int:
    """Return the process of a rank among the launcher's descendants, by torchrun's environment variables."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    below = [launcher]
    for one in below:
        below += [child for child, parent in parents.items() if parent == one]
        if f"RANK={rank}".encode() in Path(f"/proc/{one}/environ").read_bytes().split(b"\0"):
            return one
    raise AssertionError(f"no process below {launcher} is rank {rank}")
