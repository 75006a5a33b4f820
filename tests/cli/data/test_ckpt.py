"""`recipes ckpt`: list, verify and prune; and what it refuses before NeMo is imported."""

import json

import pytest
from typer.testing import CliRunner

from superpod.cli.app import app
from superpod.errors import UserError
from superpod.launch import convert
from superpod.runtime.checkpoints import resume
from superpod.runtime.runs.run_folder import RunFolder
from superpod.slurm.submission import submit
from tests.reports.runs import checkpoint_files


@pytest.fixture
def run(tmp_path):
    run = RunFolder.create(tmp_path / "runs", "tiny", facts={}, recipe_lines=["a = 1"])
    for step in (10, 20):
        checkpoint_files.write(run.checkpoints / f"step={step - 1}")
    return run


def test_checkpoints_are_listed_verified_and_pruned(run, recipes_cli):
    listed = recipes_cli("ckpt", "list", run.path)
    assert listed.returncode == 0, listed.stderr
    assert [line.split()[:3] for line in listed.stdout.splitlines()[1:]] == [
        ["step=9", "10", "unverified"],
        ["step=19", "20", "unverified"],
    ]
    assert "tp2 ranks4" in listed.stdout
    facts = json.loads(recipes_cli("ckpt", "list", run.path, "--json").stdout)
    assert [(c["step"], c["whole"], c["parameters"]) for c in facts] == [(10, True, 24), (20, True, 24)]
    done = recipes_cli("ckpt", "verify", run.path)
    assert done.returncode == 0
    assert done.stdout.startswith("step=9: complete, but unverified: it has no complete manifest, ")
    (run.checkpoints / "step=19" / "weights" / "__0_0.distcp").unlink()
    damaged = recipes_cli("ckpt", "verify", run.path)
    assert damaged.returncode == 1
    assert "step=19: DAMAGED\n  weights/__0_0.distcp is missing\n" in damaged.stdout
    dry_run = recipes_cli("ckpt", "prune", run.path, "--dry-run")
    assert "would remove step=19" in dry_run.stdout
    assert "1 of 2 checkpoints" in dry_run.stdout
    assert len(list(run.checkpoints.iterdir())) == 2
    assert recipes_cli("ckpt", "prune", run.path).returncode == 0
    assert [path.name for path in run.checkpoints.iterdir()] == ["step=9"]


def test_after_prune_the_run_resumes_from_the_printed_checkpoint(run, recipes_cli):
    """The newest checkpoint is damaged and its link is removed too; NeMo must not start at step 1."""
    newest = checkpoint_files.write(run.checkpoints / "step=29")
    (run.checkpoints / "step=29-last").symlink_to("step=29")
    data = bytearray((newest / "weights" / "__0_0.distcp").read_bytes())
    data[45] ^= 1
    (newest / "weights" / "__0_0.distcp").write_bytes(data)
    pruned = recipes_cli("ckpt", "prune", run.path)
    assert pruned.returncode == 0, pruned.stderr
    assert "removing step=29" in pruned.stdout
    assert "removing step=9" in pruned.stdout
    assert "the next attempt resumes from step 20 (step=19, unverified: it has no complete manifest)" in pruned.stdout
    assert [path.name for path in run.checkpoints.iterdir()] == ["step=19"], "the newest intact one stays"
    decided = resume.decide(run)
    resume.apply_decision(run, run.new_attempt(), decided)
    assert [link.resolve() for link in (run.attempts[0].path / resume.FOLDER).iterdir()] == [decided.checkpoint]
    verified = recipes_cli("ckpt", "verify", run.path)
    assert "the next attempt resumes from step 20 (step=19, unverified: it has no complete manifest)" in verified.stdout


def test_damaged_checkpoints_that_were_moved_are_listed(run, recipes_cli):
    (run.checkpoints / "step=19" / "weights" / "common.pt").unlink()
    resume.apply_decision(run, run.new_attempt(), resume.decide(run))
    listed = recipes_cli("ckpt", "list", run.path)
    assert "1 corrupt checkpoint (" in listed.stdout
    assert "step=19" in listed.stdout


@pytest.mark.parametrize("where", ["path", "checkpoints"])
def test_a_run_in_use_is_not_pruned(where, run, recipes_cli):
    with run.lock():
        done = recipes_cli("ckpt", "prune", getattr(run, where))
    assert done.returncode == 2
    assert len(list(run.checkpoints.iterdir())) == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["convert", "m", "empty"], "empty already exists"),
        (["convert", "empty", "new"], "no checkpoint"),
        (["convert", "m", "new", "--cluster", "dgx_h100"], "runs its ranks in a container"),
        (["convert", "m", "new", "--cluster", "testbeds"], "did you mean testbed"),
        (["prune", "empty", "--keep", "0"], "no checkpoint"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_user_errors_are_refused(words, says, refusal):
    assert says in refusal("ckpt", *words)


@pytest.mark.parametrize("options", [[], ["--dtype", "float32"], ["--adapter", "--no-forward-check"], ["--like", "m"]])
def test_a_queued_conversion_keeps_its_options(options, tmp_path, monkeypatch):
    queued, planned = [], []

    def plan(*arguments):
        planned.append(arguments)
        if len(planned) == 2:
            raise UserError("it is the job, and would convert now")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(convert, "plan_conversion", plan)
    monkeypatch.setattr(submit, "queue_command", lambda connection, profile, title, words, log: queued.extend(words))
    CliRunner().invoke(app, ["ckpt", "convert", "m", "new", *options, "--cluster", "testbed"], catch_exceptions=False)
    job = CliRunner().invoke(app, queued)
    assert "it is the job" in str(job.exception)
    assert planned[0] == planned[1]
