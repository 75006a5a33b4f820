"""Several users share a folder of runs: no verb changes another user's run."""

import os

import pytest

from superpod.common.json_files import append_line, write_json
from superpod.errors import UserError
from superpod.runtime.runs import owner, run_state
from superpod.runtime.runs.run_folder import RunFolder
from superpod.slurm.submission.submit import SCRIPT
from tests.slurm.fake_slurm import FakeSlurm

NAME = "tiny_llama3"
ALICE, BOB = 12345, 12346
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="acts as two users")


@pytest.fixture
def run(tmp_path):
    run = RunFolder.create(tmp_path / "runs", NAME, facts={"attempts": 3}, recipe_lines=["a = 1"])
    (run.path / SCRIPT).write_text("#!/bin/bash\n")
    write_json(run.path / run_state.CHAIN, {"jobs": ["1"]})
    for path in (run.path, *run.path.rglob("*")):
        os.chown(path, ALICE, ALICE)
        path.chmod(0o2777 if path.is_dir() else 0o666)  # so that only the check of the owner can refuse
    return run


@pytest.fixture
def as_bob(monkeypatch, tmp_path):
    """Make os.geteuid return BOB. The kernel lets root write, so that only this code can refuse."""
    fake = FakeSlurm(tmp_path / "fake_slurm")
    monkeypatch.setenv("PATH", fake.env["PATH"])
    monkeypatch.setattr(os, "geteuid", lambda: BOB)
    return fake


def verbs(run):
    from superpod.cli.cluster import cancel, submit, top_up
    from superpod.cli.data import ckpt
    from superpod.cli.running import finetune
    from superpod.cli.running import run as run_verb

    return {
        "cancel it": lambda: cancel.cancel(str(run.path)),
        "queue its jobs": lambda: top_up.top_up([str(run.path)]),
        "remove its checkpoints": lambda: ckpt.prune(run.path),
        "resume it": lambda: submit.submit(name=NAME, cluster="testbed", resume=str(run.path)),
        "continue it": lambda: run_verb.run(name=NAME, resume=str(run.path)),
        "continue it ": lambda: finetune.finetune(name=NAME, resume=str(run.path)),
    }


@pytest.mark.parametrize("doing", sorted(verbs(None)))
def test_another_users_run_is_not_changed(run, as_bob, doing):
    before = sorted((path, path.stat().st_mtime_ns) for path in run.path.rglob("*"))
    with pytest.raises(UserError) as refused:
        verbs(run)[doing]()
    assert str(refused.value).startswith(
        f"{run.path} belongs to {ALICE}, but you are {BOB}: only {ALICE} may {doing.strip()}"
    )
    assert sorted((path, path.stat().st_mtime_ns) for path in run.path.rglob("*")) == before
    assert as_bob.calls("scancel") == as_bob.calls("sbatch") == []


def test_a_dry_run_of_prune_is_permitted(run, as_bob, capsys):
    from superpod.cli.data import ckpt

    ckpt.prune(run.path, keep=1, dry_run=True)
    assert "0 of 0 checkpoints" in capsys.readouterr().out


def test_a_report_writes_nothing_into_another_users_run(run, as_bob):
    from superpod.cli.runs import report

    append_line(run.path / "metrics.jsonl", {"step": 1, "loss": 2.0, "attempt": "001"})
    report.report([str(run.path)])
    assert not (run.path / "loss.png").exists()


def test_root_may_cancel_but_not_queue(run):
    owner.refuse_others(run.path, "cancel it")
    with pytest.raises(UserError, match="only 12345 may queue its jobs"):
        owner.refuse_others(run.path, "queue its jobs", root_may=False)


def test_an_unmapped_owner_is_permitted(run, monkeypatch):
    os.chown(run.path, owner._overflow_uid(), -1)
    monkeypatch.setattr(os, "geteuid", lambda: BOB)
    owner.refuse_others(run.path, "cancel it")
    assert owner.user_name(owner.owner_uid(run.path)) == "?"
