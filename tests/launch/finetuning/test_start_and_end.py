"""Start and end of a real fine-tuning: early stopping, `--from RUN`, no forward check."""

import json

import pytest

from superpod.reports.runs import checkpoint_list
from superpod.runtime.runs import run_facts
from superpod.runtime.runs.run_folder import DONE, RunFolder
from tests.launch.finetuning.test_killed_launcher import EVERY, NAME, ONE, SHORT
from tests.run_module import run_module
from tests.weights import tiny

pytestmark = [pytest.mark.nemo, pytest.mark.train, pytest.mark.long, pytest.mark.timeout(4000)]

STEPS, PATIENCE = 60, 2


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start_and_end")
    run_module("tests.weights.tiny", folder / "model", timeout=900)
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, (r for r in tiny.sums(200) if "prompt" in r))))
    return folder


def tuned(place, recipes_cli, recipe, *words):
    """The run, and the output of the command."""
    given = ["--model", "model", "--data", "data.jsonl", "--validation", "0.1", *SHORT, *ONE]
    done = recipes_cli("finetune", recipe, *given, *words, cwd=place, timeout=2000)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    run = RunFolder.latest(place / "runs", recipe)
    assert run
    return run, done.stdout + done.stderr


@pytest.fixture(scope="module")
def early(place, recipes_cli):
    """No validation is better than the first by 100 nats, so the run ends after `PATIENCE` more."""
    stopping = ["--early-stopping", str(PATIENCE), "--min-delta", "100"]
    return tuned(place, recipes_cli, NAME, "optim.config.lr=2e-3", "--steps", str(STEPS), *stopping)


def losses(run, key):
    return [line[key] for line in run.metrics() if line.get(key) is not None]


def test_early_stopping_keeps_the_best_checkpoint(early):
    run, printed = early
    assert run.metrics()[-1]["step"] == EVERY * (1 + PATIENCE) < STEPS
    assert run.status().state == "done"
    assert json.loads((run.path / DONE).read_text())["early"]
    assert "stopped early: " in printed
    best = checkpoint_list.choose_best(checkpoint_list.list_checkpoints(run.path))
    assert abs((best.val_loss or 0) - min(losses(run, "val_loss"))) < 1e-3
    assert f"{best.name}, validation loss" in printed
    assert (run.path / "hf" / "config.json").is_file()


def test_training_from_a_run_starts_with_its_weights(early, place, recipes_cli):
    first, _ = early
    words = ["--from", str(first.path), "--steps", str(EVERY), "--no-forward-check", "optim.config.lr=1e-5"]
    run, printed = tuned(place, recipes_cli, NAME, *words)
    assert run.path != first.path
    assert run.facts[run_facts.FINETUNE]["start"] == str(
        checkpoint_list.choose_best(checkpoint_list.list_checkpoints(first.path)).path
    )
    assert losses(run, "loss")[0] < losses(first, "loss")[0] - 1
    assert abs(losses(run, "val_loss")[0] - min(losses(first, "val_loss"))) < 0.2
    assert "no forward check: the exported model was not compared with NeMo" in printed
    assert "servable by vLLM" in printed


def test_conversion_lists_servers(early, tmp_path, recipes_cli):
    run, _ = early
    done = recipes_cli("ckpt", "convert", run.path, tmp_path / "hf", timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "compared with transformers: on" in done.stdout
    assert "servable by vLLM" in done.stdout
    assert "no server was started" in done.stdout
