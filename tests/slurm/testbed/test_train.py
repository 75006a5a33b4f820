"""Real training on the testbed: NeMo and Megatron-Core over gloo, ranks on two nodes, started by `recipes submit`."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from superpod.runtime.runs.run_folder import RunFolder
from superpod.slurm.status import run_views
from superpod.slurm.submission import connection
from tests.slurm.testbed.bed import until

pytestmark = [pytest.mark.nemo, pytest.mark.train]

SMALL = ("data.seq_length=64", "model.config.seq_length=64", "data.micro_batch_size=2", "data.global_batch_size=8")
TP1 = (
    "trainer.devices=1",
    "trainer.strategy.tensor_model_parallel_size=1",
    "trainer.strategy.sequence_parallel=False",
    "trainer.callbacks[2].tp_comm_overlap=False",
)
QUICK = ("trainer.limit_val_batches=0", "trainer.limit_test_batches=0")
SECRETS = {"HF_TOKEN": "hf_neverwritten1234", "WANDB_API_KEY": "neverwrittenneverwritten"}


@pytest.fixture(scope="module")
def text(tmp_path_factory, recipes_cli):
    """Two packages of the standard library as a data folder with a vocabulary of 512."""
    folder = tmp_path_factory.mktemp("text") / "data"
    library = Path(json.__file__).parents[1]
    source = ("--text", library / "email" / "*.py", "--text", library / "asyncio" / "*.py")
    done = recipes_cli("data", "build", *source, "--vocab-size", 512, "--split", "8,1,1", "--out", folder)
    assert done.returncode == 0, done.stderr
    return folder


def submitted(recipes_cli, *words, env=None) -> RunFolder:
    done = recipes_cli("submit", *words, env=env, timeout=400)
    assert done.returncode == 0, done.stderr
    (folder,) = (line.split(maxsplit=1)[1] for line in done.stdout.splitlines() if line.startswith("run "))
    return RunFolder.open(folder)


def seen(run: RunFolder) -> run_views.RunView:
    return run_views.summarize_runs([run], connection.Connection())[0]


def until_done(run: RunFolder, limit_s: float = 1200) -> None:
    def story() -> str:
        logs = [f"{log}: {log.read_text()[-1500:]}" for attempt in run.attempts for log in attempt.logs]
        outs = [out.read_text()[-1500:] for out in run.path.glob("slurm-*.out")]
        return "\n".join([str(seen(run)), *outs, *logs])

    until(lambda: seen(run).state in ("done", "failed", "cancelled"), limit_s, story)
    assert seen(run).state == "done", story()


def test_submit_trains_on_two_nodes(testbed, profile, recipes_cli, text):
    """TP inside a node, DP across; the loss falls; sacct, status and logs agree; no secret is written."""
    words = ("tiny_llama3", "--cluster", profile(), "--nodes", 2, "--data", text, *SMALL, *QUICK)
    run = submitted(recipes_cli, *words, "trainer.max_steps=20", env=SECRETS)
    until_done(run)
    losses = [line["loss"] for line in run.metrics()]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.2
    job = run.attempts[0].result["job"]
    until(lambda: testbed.slurm("sacct", "-X", "-n", "-j", job, "-o", "state").split() == ["COMPLETED"], 30)
    assert sorted(log.name for log in run.attempts[0].logs) == ["0.log", "1.log", "srun.log"]
    assert len(run.attempts[0].result["nodes"]) == 2
    assert len([*run.attempts[0].path.rglob("nemo_log_globalrank-*")]) == 2, "a file per node"
    status = json.loads(recipes_cli("status", run.path, "--json").stdout)[0]
    assert (status["state"], status["step"]) == ("done", 20)
    assert "[001 node 0 rank 0]" in recipes_cli("logs", run.path).stdout
    written = [p for p in run.path.rglob("*") if p.is_file() and b"neverwritten" in p.read_bytes()]
    assert written == []


def test_a_plain_sbatch_of_the_rendered_script(testbed, profile, recipes_cli, text, tmp_path):
    """Submitted without our and NeMo's packages on the path; the job creates a run folder."""
    where = profile()
    words = ("tiny_llama3", "--cluster", where, "--nodes", 2, "--data", text, *SMALL, *QUICK, *TP1)
    rendered = recipes_cli("render", *words, "trainer.max_steps=6", timeout=400)
    assert rendered.returncode == 0, rendered.stderr
    script = tmp_path / "job.sbatch"
    script.write_text(rendered.stdout)
    plain = {"PATH": "/usr/bin:/bin:/usr/sbin", "SLURM_CONF": os.environ["SLURM_CONF"], "HOME": str(tmp_path)}
    if "PYTHONPATH" in os.environ:  # of the ranks, where this project is not installed into their environment
        plain["PYTHONPATH"] = os.environ["PYTHONPATH"]
    job = subprocess.run(["sbatch", "--parsable", script], env=plain, cwd=tmp_path, capture_output=True, text=True)
    assert job.returncode == 0, job.stderr
    assert testbed.until_ended(job.stdout.strip(), 900) == "COMPLETED"
    (facts,) = (tmp_path / "runs" / "tiny_llama3").glob("*/run.json")
    run = RunFolder.open(facts.parent)
    assert run.done
    assert len(run.metrics()) == 6
    assert "trainer.max_steps" in (run.path / "recipe.txt").read_text()


@pytest.mark.long
def test_signalled_and_killed_attempts_lose_no_saved_step(testbed, profile, recipes_cli, text):
    """Slurm's signal before the limit, then a kill -9: losses equal an uninterrupted run's within 1e-5."""
    where = profile()
    words = ("tiny_llama3_fp32", "--cluster", where, "--nodes", 2, "--data", text, *SMALL, *QUICK, *TP1)
    steps = ("trainer.max_steps=24", "log.ckpt.every_n_train_steps=6")
    whole = submitted(recipes_cli, *words, *steps)
    until_done(whole)
    broken = submitted(recipes_cli, *words, *steps)
    until(lambda: len(broken.metrics()) >= 3, 600)
    testbed.slurm("scancel", "--signal=USR1", f"{broken.attempts[0].result['job']}.0")
    until(lambda: len(broken.metrics()) >= 9 and len(broken.attempts) == 2, 600)
    first = broken.attempts[0].result
    assert first["state"] == "requeued"
    assert first["last_step"] == first["checkpoint"], "saved where it stopped"
    testbed.slurm("scancel", "--signal=KILL", f"{broken.attempts[1].result['job']}.0")
    until_done(broken)
    assert len(broken.attempts) == 3
    for one, two in zip(whole.metrics(), broken.metrics(), strict=True):
        assert abs(one["loss"] - two["loss"]) < 1e-5
