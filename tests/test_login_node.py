"""The base install in a fresh environment: every verb works or is refused with a short message, within seconds."""

import base64
import importlib.metadata
import io
import json
import os
import re
import resource
import subprocess
import sys
import tarfile

import pytest
import typer

from superpod.cli.app import app
from tests.profiles import synthetic_profiles
from tests.test_packaging import installed, run, wheel  # noqa: F401 - fixtures

NAME = "llama3_8b_pretrain_h100_bf16"
TUNED = "llama32_1b_lora_h100_bf16"
MOST_CPU_S = 3.0
"""CPU seconds; the wall time depends on other tests."""

ANSWERS = {
    "plan": "llama3_8b --gpu h100 --nodes 1 --gbs 128",
    "check": NAME,
    "memory": NAME,
    "explain": NAME,
    "cost": f"{NAME} --tokens 1e12",
    "predict": "--from table.csv --out predicted.csv",
    "list": "llama3_8b",
    "tune": f"{NAME} --nodes 3",
    "calibrate": "--from measured.csv --out mine.toml",
    "why": "failed.log",
    "fit": "llama3_8b --gpu h100 --gpus 8 --task lora",
    "doctor": "",
    "render": f"{NAME} --cluster dgx_h100 trainer.max_steps=10",
    "status": "",
    "profile show": "trace.json",
}
REFUSES = {
    "check": f"{NAME} trainer.max_steps=10",
    "render": f"{NAME} --cluster dgx_h100 with=fsdp",
    "show": NAME,
    "export": f"{NAME} --to recipe.py",
    "diff": f"{NAME} {TUNED}",
    "prove": "tiny",
    "rehearse": NAME,
    "run": "tiny_llama3",
    "finetune": f"{TUNED} --model hf --data samples.jsonl",
    "data build": "--text text.txt --out folder --vocab-size 300",
    "submit": f"{NAME} --cluster dgx_h100",
    "report": "runs",
    "top-up": "runs",
    "logs": "runs",
    "cancel": "runs",
    "history": "runs",
    "generate": "runs hello",
    "perplexity": "runs --data samples.jsonl",
    "cluster check": "dgx_h100",
    "cluster health": "dgx_h100",
    "cluster bisect": "dgx_h100",
    "cluster init": "--like dgx_h100 --to mine.toml",
    "data add": "--out folder --prefix none --tokenizer none",
    "ckpt list": "runs",
    "ckpt verify": "runs",
    "ckpt prune": "runs",
    "ckpt reset": "runs",
    "ckpt convert": "hf out",
    "ui": "",
}
LONGER = {"scale": NAME}
"""Verbs that take longer because they search many sizes."""


def verbs() -> set[str]:
    """Return all verbs, including those of groups such as `ckpt list`."""
    command = typer.main.get_command(app)
    names: set[str] = set()
    for name, verb in command.commands.items():  # pyright: ignore[reportAttributeAccessIssue]
        inner = getattr(verb, "commands", None)
        names |= {f"{name} {below}" for below in inner} if inner else {name}
    return names


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("login")
    (folder / "text.txt").write_text("hello\n" * 50)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (folder / "samples.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    (folder / "runs").mkdir()
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 8}))
    (folder / "measured.csv").write_text(
        "model,gpu,gpus,seq,gbs,tp,pp,step_time_s\nllama3_8b,h100,8,4096,128,2,1,9.5\n"
    )
    (folder / "failed.log").write_text("OSError: [Errno 28] No space left on device\n")
    (folder / "trace.json").write_text(json.dumps(synthetic_profiles.chrome()))
    (folder / "table.csv").write_text("model,gpu,gpus,seq,gbs,tp,pp\nllama3_8b,h100,8,4096,128,2,1\n")
    return folder


def called(python, place, verb, words):
    """Run a command; returns the finished process and its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environ = {**os.environ, "NO_COLOR": "1", "COLUMNS": "160", "HOME": str(place), "OMP_NUM_THREADS": "1"}
    environ = {name: value for name, value in environ.items() if not name.startswith("COV")}
    done = run(python, "-m", "superpod.cli", *verb.split(), *words.split(), cwd=place, env=environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime - before.ru_utime


def test_all_verbs_are_tested():
    tried = {*ANSWERS, *REFUSES, *LONGER}
    assert verbs() - tried == set()
    assert tried - verbs() == set()


@pytest.mark.slow
@pytest.mark.parametrize("verb", ANSWERS | LONGER)
def test_a_verb_works_without_nemo(installed, place, verb):  # noqa: F811
    done, seconds = called(installed, place, verb, (ANSWERS | LONGER)[verb])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert seconds < (MOST_CPU_S if verb in ANSWERS else 20)


@pytest.mark.slow
@pytest.mark.parametrize("verb", REFUSES)
def test_a_verb_is_refused_with_a_short_message(installed, place, verb):  # noqa: F811
    done, seconds = called(installed, place, verb, REFUSES[verb])
    output = done.stdout + done.stderr
    assert done.returncode == 2, output
    assert "Traceback" not in output
    assert "internal error" not in output
    assert re.search(r"^error: ", done.stderr, re.MULTILINE), output
    assert len(done.stderr.strip().splitlines()) <= 4, output
    assert seconds < MOST_CPU_S


def unpacked(script: str, folder):
    """Unpack the files that a batch script carries, like the job's shell."""
    for name, body in re.findall(r"^#>> (\S+)\n(.*?)^#<<", script, re.DOTALL | re.MULTILINE):
        text = "\n".join(line.removeprefix("#|").removeprefix(" ") for line in body.splitlines())
        if name.endswith(".gz"):
            with tarfile.open(fileobj=io.BytesIO(base64.b64decode(text))) as archive:
                archive.extractall(folder, filter="data")
        else:
            (folder / name).write_text(text + "\n")


ON_A_NODE = """
import os, sys
from pathlib import Path
code = Path(sys.argv[1])
sys.path.insert(0, str(code))
import superpod
assert Path(superpod.__file__).is_relative_to(code), superpod.__file__
from superpod.runtime.rank.rank import load
load(code / "recipe.py").recipe()
"""


@pytest.fixture(scope="module")
def rendered(installed, place):  # noqa: F811
    done, _ = called(installed, place, "render", f"{NAME} --cluster dgx_h100 trainer.max_steps=10 optim.config.lr=1e-4")
    assert done.returncode == 0, done.stderr
    assert "the job builds and checks the configuration" in done.stderr
    return done.stdout


def on_a_node(code, run_dir):
    """Call `recipe()` of the carried files like rank 0 of a job, with the NeMo of this environment."""
    run_dir.mkdir()
    environ = {**os.environ, "SUPERPOD_RUN_DIR": str(run_dir), "RANK": "0", "TORCH_EXTENSIONS_DIR": os.devnull}
    command = [sys.executable, "-W", "ignore", "-c", ON_A_NODE, code]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environ)


@pytest.mark.nemo
@pytest.mark.slow
def test_the_job_builds_what_recipes_show_prints(rendered, tmp_path, preloaded_cli):
    code = tmp_path / "code"
    code.mkdir()
    unpacked(rendered, code)
    done = on_a_node(code, tmp_path / "run")
    assert done.returncode == 0, done.stderr[-2000:]
    shown = preloaded_cli("show", NAME, "trainer.max_steps=10", "optim.config.lr=1e-4")
    lines = [line for line in shown.stdout.splitlines() if not line.startswith("#")]
    assert (tmp_path / "run" / "recipe.txt").read_text().splitlines() == lines
    assert len(lines) > 100


@pytest.mark.nemo
@pytest.mark.long
def test_a_job_with_the_plan_of_another_run_is_refused(rendered, tmp_path):
    code = tmp_path / "code"
    code.mkdir()
    unpacked(rendered.replace('\\"tp\\": 2', '\\"tp\\": 4').replace('"tp": 2', '"tp": 4'), code)
    done = on_a_node(code, tmp_path / "run")
    assert done.returncode == 1
    assert "refused: the run built on this node differs from the plan: layout.tp: 4 planned, 2 built" in done.stderr
    assert not (tmp_path / "run" / "recipe.txt").exists()


def test_the_required_packages_are_those_of_the_extra():
    from superpod.collection import installed as here

    assert here.missing_package() == ""
    assert set(here.REQUIRED_PACKAGES) >= {"torch", "nemo"}
    assert importlib.metadata.version("nemo_run")
