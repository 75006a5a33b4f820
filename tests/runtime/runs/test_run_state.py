"""Every state of a run, by what its folder and Slurm's queue hold."""

import dataclasses
import json
from pathlib import Path

import pytest

from superpod.runtime.runs.run_state import (
    STALLED_S,
    STATES,
    SUBMITTING_S,
    AttemptFiles,
    Cause,
    QueuedJob,
    RunFiles,
    SlurmJobs,
    State,
    Status,
    Stop,
    StoppedBy,
    status_of,
)

NOW = 1_800_000_000.0
RUN = Path("/runs/llama/20270115T080000Z-abcdef")
MINE = QueuedJob("7", "RUNNING", "None", "N/A")
NEXT = QueuedJob("8", "PENDING", "Dependency", "N/A")
TRAINING = {0: {"t": NOW - 1, "step": 3, "phase": "train"}}
SAVING = {0: {"t": NOW - 1, "step": 3, "phase": "save"}}
SILENT = {0: {"t": NOW - 2 * STALLED_S, "step": 3, "phase": "train"}}
UNKNOWN, NONE = None, SlurmJobs(())
CANCELLED_JOB = SlurmJobs((), newest_cancelled=True)


def attempt(state=None, beats=None, *, job="7", name="001", **more):
    result = {"state": state, "job": job, "started": NOW - 60, **more} if state else {}
    return AttemptFiles(name, result, beats or {})


def slurm_run(newest=None, **more):
    return RunFiles(RUN, {"t": NOW - 2 * SUBMITTING_S}, attempt=newest, has_script=True, has_chain=True, **more)


def local_run(newest, **more):
    return RunFiles(RUN, {}, attempt=newest, **more)


def jobs(*queued):
    return SlurmJobs(queued)


USER, GUARD = (Stop("why", by) for by in (StoppedBy.USER, StoppedBy.AUTOMATIC))
ON_SLURM = [
    # (newest attempt, other files, jobs, state)
    (None, {}, UNKNOWN, "queued"),
    (None, {}, jobs(NEXT), "queued"),
    (None, {}, NONE, "failed"),
    (None, {"has_chain": False, "facts": {"t": NOW - 1}}, NONE, "queued"),
    (None, {"has_chain": False}, NONE, "failed"),
    (None, {"stop": USER}, NONE, "cancelled"),
    (None, {"is_done": True}, NONE, "done"),
    (attempt("running", TRAINING), {}, jobs(MINE, NEXT), "running"),
    (attempt("running", SAVING), {}, jobs(MINE), "saving"),
    (attempt("running", SILENT), {}, jobs(MINE), "stalled"),
    (attempt("running", SILENT), {"facts": {"stalled_s": 9 * STALLED_S}}, jobs(MINE), "running"),
    (attempt("running"), {}, jobs(MINE), "running"),
    (attempt("running", started=NOW - 20 * STALLED_S), {}, jobs(MINE), "stalled"),
    (attempt("running", TRAINING), {}, UNKNOWN, "running"),
    (attempt("running", TRAINING), {}, jobs(NEXT), "requeued"),
    (attempt("running", TRAINING), {}, jobs(dataclasses.replace(MINE, state="PENDING")), "requeued"),
    (attempt("running", TRAINING), {}, NONE, "failed"),
    (attempt("running", TRAINING), {}, CANCELLED_JOB, "cancelled"),
    (attempt("running", TRAINING), {"resumed_after": 1}, CANCELLED_JOB, "failed"),
    (attempt("running", TRAINING), {"stop": USER}, jobs(MINE), "cancelled"),
    (attempt("running", TRAINING), {"stop": GUARD}, jobs(MINE), "failed"),
    (attempt("running", TRAINING), {"is_done": True, "stop": USER}, jobs(MINE), "done"),
    (attempt("stalled", SILENT), {}, jobs(MINE), "stalled"),
    (attempt("stalled", TRAINING), {}, jobs(MINE), "running"),
    (attempt("stalled", SILENT), {}, UNKNOWN, "stalled"),
    (attempt("stalled", SILENT), {}, jobs(NEXT), "requeued"),
    (attempt("stalled", SILENT), {}, NONE, "failed"),
    (attempt("requeued"), {}, jobs(NEXT), "requeued"),
    (attempt("requeued"), {}, NONE, "requeued"),
    (attempt("failed"), {}, jobs(NEXT), "requeued"),
    (attempt("failed"), {}, NONE, "failed"),
    (attempt("cancelled"), {}, NONE, "cancelled"),
    (attempt("queued"), {}, UNKNOWN, "queued"),
    (attempt(), {}, UNKNOWN, "failed"),
    (attempt(), {}, NONE, "failed"),
    (attempt(None, TRAINING), {}, jobs(MINE), "running"),
    (attempt(), {}, jobs(NEXT), "requeued"),
    (attempt("running"), {"is_done": True, "pending_export": "hf", "is_locked": True}, jobs(MINE), "running"),
    (attempt("failed"), {"is_done": True, "pending_export": "hf"}, jobs(NEXT), "failed"),
    (attempt("requeued", was_done=20), {"is_done": True}, NONE, "requeued"),
    (attempt("done", was_done=20), {"is_done": True}, NONE, "done"),
]


@pytest.mark.parametrize(("newest", "files", "slurm", "state"), ON_SLURM)
def test_state_on_slurm(newest, files, slurm, state):
    status = status_of(dataclasses.replace(slurm_run(newest), **files), slurm, NOW)
    assert status.state is State(state)
    assert status.attempt == ("001" if newest else "")
    assert status.cause is None


HERE = [
    (attempt("running", TRAINING, job=""), {"is_locked": True}, "running"),
    (attempt("running", SAVING, job=""), {"is_locked": True}, "saving"),
    (attempt("running", SILENT, job=""), {"is_locked": True}, "stalled"),
    (attempt("stalled", SILENT, job=""), {}, "stalled"),
    (attempt("failed", job=""), {}, "failed"),
    (attempt("cancelled", job=""), {"is_locked": True}, "cancelled"),
    (attempt("cancelled", job=""), {"is_done": True}, "done"),
    (attempt("cancelled", job="", was_done=20), {"is_done": True}, "cancelled"),
    (attempt("done", job=""), {"is_done": True, "pending_export": "hf", "is_locked": True}, "running"),
    (attempt("done", job=""), {"is_done": True, "pending_export": "hf"}, "failed"),
]


@pytest.mark.parametrize("slurm", [UNKNOWN, NONE])
@pytest.mark.parametrize(("newest", "files", "state"), HERE)
def test_state_on_this_machine_whatever_slurm_says(newest, files, state, slurm):
    status = status_of(local_run(newest, **files), slurm, NOW)
    assert (status.state, status.cause) == (state, None)


@pytest.mark.parametrize("beats", [TRAINING, SILENT])
def test_a_local_attempt_without_a_holder_was_killed(beats):
    status = status_of(local_run(attempt("running", beats, job="")), None, NOW)
    assert (status.state, status.cause) == (State.FAILED, Cause.UNRECORDED)


def test_a_message_names_the_job_that_waits_and_what_the_attempt_recorded():
    newest = attempt("failed", message="out of memory", exit_code=9)
    assert status_of(slurm_run(newest), jobs(NEXT), NOW) == Status(
        State.REQUEUED, "out of memory; job 8 is pending (Dependency)", "001", 9
    )


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (dataclasses.replace(NEXT, start="2027-01-16T00:00"), "Dependency, expected to start 2027-01-16T00:00"),
        (dataclasses.replace(NEXT, reason="Priority"), "Priority"),
    ],
)
def test_a_queued_run_says_what_slurm_waits_for(job, message):
    assert status_of(slurm_run(), jobs(job), NOW) == Status(State.QUEUED, message)


def test_a_dependency_that_failed_is_explained():
    job = dataclasses.replace(NEXT, reason="DependencyNeverSatisfied")
    assert "cancel it" in status_of(slurm_run(), jobs(job), NOW).message


def test_the_message_of_an_attempt_that_was_stalled_is_dropped_once_it_runs():
    for state, message in (("stalled", ""), ("running", "importing")):
        newest = attempt(state, TRAINING, message="importing")
        assert status_of(slurm_run(newest), jobs(MINE), NOW).message == message


def test_a_run_without_queued_jobs_names_the_command_that_adds_some():
    assert status_of(slurm_run(attempt("requeued")), NONE, NOW).message.endswith(f"`recipes top-up {RUN}`")
    sbatch_by_hand = dataclasses.replace(slurm_run(attempt("requeued")), has_chain=False)
    assert "top-up" not in status_of(sbatch_by_hand, NONE, NOW).message


def test_the_values_are_the_words_in_files_and_output():
    assert json.dumps(State.DONE) == '"done"'
    assert f"{State.STALLED} {State.SAVING!s}" == "stalled saving"
    assert [*STATES, "unreadable"] == [*State]
    assert {state for state in State if state.continues} == {"queued", "running", "saving", "requeued", "stalled"}
