"""`submit --resume` with changes; a refusal changes nothing."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from superpod.cli.cluster import submit
from superpod.common.json_files import write_json
from superpod.errors import UserError
from superpod.runtime.attempts import guard
from superpod.runtime.runs import run_state
from superpod.runtime.runs.run_folder import RunFolder
from superpod.slurm.status import run_views
from superpod.slurm.submission import connection, resume
from superpod.slurm.submission import submit as slurm_submit
from superpod.slurm.submission.resume_run import ResumeOptions, resume_run
from tests.slurm.jobs import planned

SCRIPT = "#!/bin/bash\n#SBATCH --job-name=toy\n#SBATCH --time=4:00:00\n#SBATCH --requeue\nexec true\n"


@pytest.fixture
def run(tmp_path):
    folder = RunFolder.create(tmp_path, "toy", facts={"max_steps": 100}, recipe_lines=["a = 1", "b = 2"])
    (folder.path / "job.sbatch").write_text(SCRIPT)
    guard.stop(folder, "planted", by=run_state.StoppedBy.AUTOMATIC)
    return folder


def contents(run: RunFolder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()}


def resolved(**changes) -> Any:
    """The fields of a resolved run that `refuse_incompatible` compares."""
    job = planned(tp=2, gbs=16)
    return SimpleNamespace(**{"nodes": 2, "gpus_per_node": 8, "layout": job.layout, "job": job, **changes})


def test_new_time_limit_is_written_into_the_script(run):
    assert resume.read_time_limit(run) == "4:00:00"
    resume.set_time(run, "1-12:00:00")
    assert resume.read_time_limit(run) == "1-12:00:00"
    assert (run.path / "job.sbatch").read_text() == SCRIPT.replace("4:00:00", "1-12:00:00")
    assert run.facts["limit_s"] == 36 * 3600, "the pace is judged by it"
    assert run.facts["max_steps"] == 100


def test_script_without_time_limit_is_refused(run):
    (run.path / "job.sbatch").write_text("#!/bin/bash\n")
    with pytest.raises(UserError, match="no #SBATCH --time"):
        resume.set_time(run, "1:00:00")


def test_files_are_restored_after_a_refusal(run):
    before = contents(run)

    def change_and_fail() -> None:
        with resume.restore_on_failure(run):
            resume.set_time(run, "1:00:00")
            guard.allow_resume(run)
            run.update({"max_steps": 200}, ["a = 3"])
            raise UserError("sbatch: error: QOSMaxSubmitJobPerUserLimit")

    with pytest.raises(UserError, match="QOS"):
        change_and_fail()
    assert contents(run) == before
    assert run.stop


@pytest.mark.parametrize(
    ("after", "says"),
    [
        (resolved(nodes=4), "must keep its size, but this would change nodes 2 -> 4"),
        (resolved(layout=replace(planned().layout, tp=4)), "must keep its layout, .* tp 2 -> 4"),
        (
            resolved(job=planned(tp=2, gbs=16).replace(model=planned().model.replace(layers=16))),
            "must keep its model, .* layers 32 -> 16",
        ),
    ],
)
def test_changes_incompatible_with_checkpoints_are_refused(after, says):
    with pytest.raises(UserError, match=says):
        resume.refuse_incompatible(resolved(), after)


def test_batch_and_steps_may_change():
    resume.refuse_incompatible(resolved(), resolved(layout=replace(planned(tp=2, gbs=16).layout, gbs=64)))


def test_changed_lines_are_listed_by_path(run):
    after: Any = SimpleNamespace(lines=["a = 1", "b = 3", "c = 4"])
    assert resume.changed_lines(run, after) == ["b: 2 -> 3", "c: - -> 4"]


@pytest.mark.parametrize("option", ["nodes", "seq", "gbs", "data", "runs", "sweep"])
def test_options_that_do_not_apply_to_resume_are_refused(option, tmp_path):
    value: Any = {"nodes": 4, "seq": 4096, "gbs": 8, "data": tmp_path, "runs": "/tmp", "sweep": ["a.b=1,2"]}[option]
    with pytest.raises(UserError, match=f"--{option} conflicts with --resume: a"):
        submit.submit(name="toy", cluster="testbed", resume="/nowhere", **{option: value})


def test_done_run_without_more_steps_is_refused(run, monkeypatch):
    write_json(run.path / "done", {"step": 100})
    how = ResumeOptions("toy", "testbed", str(run.path), (), "", 0, [], dry_run=False)
    with pytest.raises(UserError, match="is done at step 100") as refused:
        resume_run(how)
    assert "trainer.max_steps=200" in refused.value.hint


@pytest.fixture
def changed(monkeypatch) -> Any:
    """A submission for `rewrite` whose script is set by the test."""
    monkeypatch.setattr(slurm_submit, "facts", lambda _submission: {"max_steps": 100})
    monkeypatch.setattr(slurm_submit, "script", lambda submission, **_: submission.text)
    return lambda text: SimpleNamespace(run=SimpleNamespace(max_steps=100, lines=[]), plan={}, text=text)


def test_previous_scripts_are_archived(run, changed):
    """Its code is in it, and every job unpacks its own."""
    for text in ("A", "B", "C"):
        resume.rewrite(run, changed(text))
        assert (run.path / "job.sbatch").read_text() == text
    scripts = {path.name: path.read_text() for path in run.path.glob("job-until-*")}
    assert scripts == {
        "job-until-000.sbatch": SCRIPT,
        "job-until-000.2.sbatch": "A",
        "job-until-000.3.sbatch": "B",
    }


def test_refused_second_change_keeps_the_first(run, changed):
    """Nothing of it stays."""
    resume.rewrite(run, changed("A"))
    before = contents(run)

    def change_and_fail() -> None:
        with resume.restore_on_failure(run):
            resume.rewrite(run, changed("B"))
            raise UserError("sbatch: error: QOSMaxSubmitJobPerUserLimit")

    with pytest.raises(UserError, match="QOS"):
        change_and_fail()
    assert contents(run) == before


class FakeSlurm(connection.Connection):
    """Fake: `answer` for squeue, Ctrl-C at the second sbatch where it `interrupts`; keeps the calls."""

    def __init__(self, answer: str | None, *, interrupts: bool = False) -> None:
        self.answer, self.interrupts, self.calls = answer, interrupts, []

    def run(self, command, **how):
        self.calls.append(command)
        names = [call[0] for call in self.calls]
        if command[0] == "squeue" and self.answer is None:
            raise UserError("this machine: squeue did not answer within 30 s")
        if self.interrupts and command[0] == "sbatch" and names.count("sbatch") == 2:
            raise KeyboardInterrupt
        return {"squeue": self.answer or "", "sbatch": "7\n"}.get(command[0], "")


@pytest.fixture
def resumed(run, monkeypatch):
    """`submit --resume RUN --attempts 2`, of a run with a checkpoint, over a fake Slurm."""
    from superpod.runtime.checkpoints import resume as checkpoint

    whole = SimpleNamespace(step=50, damaged=(), lost_steps=0, words="")
    monkeypatch.setattr(checkpoint, "decide_by_sizes", lambda _run: whole)

    def go(slurm: FakeSlurm) -> None:
        monkeypatch.setattr(connection, "connect", lambda _profile: slurm)
        resume_run(ResumeOptions("toy", "testbed", str(run.path), (), "", 2, [], dry_run=False))

    return go


def test_run_with_unknown_jobs_is_not_queued(run, resumed):
    """squeue does not answer: jobs of the run may live."""
    slurm = FakeSlurm(None)
    with pytest.raises(UserError, match="queued jobs are unknown"):
        resumed(slurm)
    assert "sbatch" not in [call[0] for call in slurm.calls]


def test_unreadable_run_is_not_queued(run, resumed, monkeypatch):
    """Its row has no jobs because they were not queried."""
    monkeypatch.setattr(run_views, "summarize_run", lambda *_words, **_more: 1 / 0)
    assert run_views.summarize_runs([run], FakeSlurm(""))[0].jobs is None
    with pytest.raises(UserError, match="cannot be read: ZeroDivisionError"):
        resumed(slurm := FakeSlurm(""))
    assert "sbatch" not in [call[0] for call in slurm.calls]


def test_interrupt_while_queueing_cancels_jobs(run, resumed):
    """What was queued with the new script is cancelled when the folder is put back."""
    with pytest.raises(KeyboardInterrupt):
        resumed(slurm := FakeSlurm("", interrupts=True))
    assert slurm.calls[-1] == ["scancel", f"--name={slurm_submit.job_name(str(run.path))}"]
    assert run.stop
