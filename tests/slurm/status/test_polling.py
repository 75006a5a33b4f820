"""A live page queries Slurm every 30 s, reads files each time, and changes nothing."""

import shutil
import threading
import time

from superpod.reports.runs import run_list
from superpod.slurm.status import polling, run_views
from superpod.slurm.submission.connection import Connection
from superpod.slurm.submission.submit import job_name
from tests.reports.growing_run import GrowingRun
from tests.slurm.slurm_runs import snapshot, submitted, with_attempt


def settled(poller):
    if poller._thread:
        poller._thread.join()
    return poller


def test_local_runs_do_not_query_slurm(tmp_path, slurm):
    growing = GrowingRun(tmp_path / "runs")
    growing.grow(5)
    poller = polling.RunPoller(Connection())
    views = poller.views(run_list.list_runs(tmp_path / "runs"))
    assert [view.step for view in views] == [5]
    assert slurm.calls("squeue") == []
    assert poller.asked_at is None


def test_slurm_is_queried_once_per_interval_and_files_each_time(tmp_path, slurm):
    run = submitted(tmp_path / "runs")
    with_attempt(run, "100")
    slurm.add(job_name(str(run.path)), "RUNNING", job="100")
    poller = polling.RunPoller(Connection())
    seen = [poller.views(run_list.list_runs(tmp_path / "runs"))[0] for _ in range(5)]
    assert [view.state for view in seen] == ["running"] * 5
    assert len(slurm.calls("squeue")) == 1
    (run.path / "done").write_text("{}")
    assert poller.views(run_list.list_runs(tmp_path / "runs"))[0].state == "done"
    assert len(slurm.calls("squeue")) == 1


def test_slurm_is_queried_again_after_the_interval(tmp_path, slurm):
    run = submitted(tmp_path / "runs")
    with_attempt(run, "100")
    slurm.add(job_name(str(run.path)), "RUNNING", job="100")
    poller = polling.RunPoller(Connection(), every_s=0)
    poller.views(run_list.list_runs(tmp_path / "runs"))
    slurm._state.write_text("[]")  # killed, and the controller has forgotten it
    settled(poller).views(run_list.list_runs(tmp_path / "runs"))
    view = settled(poller).views(run_list.list_runs(tmp_path / "runs"))[0]
    assert view.state == "failed"
    assert "no job is queued" in view.message
    assert polling.POLL_S == 30


def test_attempt_newer_than_the_answer_is_running(tmp_path, slurm):
    run = submitted(tmp_path / "runs")
    slurm.add(job_name(str(run.path)), "PENDING", job="100")
    poller = polling.RunPoller(Connection())
    assert poller.views(run_list.list_runs(tmp_path / "runs"))[0].state == "queued"
    with_attempt(run, "100")
    view = poller.views(run_list.list_runs(tmp_path / "runs"))[0]
    assert (view.state, view.jobs_unknown) == ("running", run_views.JobsUnknown.NOT_ASKED)


def test_silent_slurm_does_not_block(tmp_path, slurm, monkeypatch):
    monkeypatch.setattr(polling, "FIRST_S", 0.1)
    run = submitted(tmp_path / "runs")
    with_attempt(run, "100")
    answer = threading.Event()

    class Silent(Connection):
        def run_bytes(self, command, **how):
            answer.wait(60)
            return super().run_bytes(command, **how)

    poller = polling.RunPoller(Silent())
    began = time.monotonic()
    view = poller.views(run_list.list_runs(tmp_path / "runs"))[0]
    assert (view.state, view.jobs_unknown) == ("running", run_views.JobsUnknown.NO_ANSWER)
    assert time.monotonic() - began < 30
    answer.set()
    settled(poller)
    assert poller.asked_at is not None


def test_polling_changes_nothing(tmp_path, slurm):
    growing, run = GrowingRun(tmp_path / "runs"), submitted(tmp_path / "runs")
    growing.grow(5)
    growing.beat()
    with_attempt(run, "100")
    before = snapshot(tmp_path / "runs")
    page = polling.RunsPage(polling.RunPoller(Connection()), lambda: polling.list_runs(tmp_path / "runs"))
    for _ in range(3):
        page._next_s = 0
        page.refresh()
    assert len(page.views) == 2
    assert snapshot(tmp_path / "runs") == before


def test_deleted_and_truncated_runs(tmp_path, slurm):
    first, second = GrowingRun(tmp_path / "runs", "a"), GrowingRun(tmp_path / "runs", "b")
    page = polling.RunsPage(polling.RunPoller(Connection()), lambda: polling.list_runs(tmp_path / "runs"))
    page.refresh()
    assert len(page.views) == 2
    (first.path / "run.json").write_text('{"recipe": ')
    shutil.rmtree(second.path)
    page._next_s = 0
    page.refresh()
    assert [view.state for view in page.views] == ["unreadable"]
    shutil.rmtree(tmp_path / "runs")
    page._next_s = 0
    page.refresh()
    assert "does not exist" in page.problem


def test_many_runs_are_polled_less_often(tmp_path, slurm):
    for name in "abc":
        GrowingRun(tmp_path / "runs", name)
    looks = []
    page = polling.RunsPage(
        polling.RunPoller(Connection()), lambda: looks.append(1) or polling.list_runs(tmp_path / "runs")
    )
    began = time.monotonic()
    page.refresh()
    took = time.monotonic() - began
    page.refresh()
    assert len(looks) == 1
    assert page._next_s - began >= took
