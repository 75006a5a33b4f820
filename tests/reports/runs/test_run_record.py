"""Real run folders as records: which steps count, which were made twice, and who made them."""

import json
from itertools import pairwise

import pytest

from superpod.common.json_files import append_line
from superpod.reports.runs import run_record
from superpod.runtime.runs.run_folder import RunFolder
from tests.reports.report_cases import KILLED_TWICE, ON_SLURM, copied, known, lines_of, made_up


@pytest.mark.parametrize(("name", "steps"), [(KILLED_TWICE, 60), (ON_SLURM, 24)])
def test_steps_that_a_later_attempt_made_again_are_those_after_its_checkpoint(name, steps, tmp_path):
    run = copied(name, tmp_path)
    record = run_record.read_run(run)
    assert [step.step for step in record.steps] == [*range(1, steps + 1)]
    assert [span.name for span in record.spans] == ["001", "002", "003"]
    results = [json.loads((a.path / "result.json").read_text()) for a in run.attempts]
    made = {(line["attempt"], line["step"]) for line in lines_of(run)}
    twice = set()
    for attempt, after in pairwise(results):
        twice |= {key for key in made if key[0] == attempt["attempt"] and key[1] > after["resume"]["step"]}
    assert {(step.attempt, step.step) for step in record.repeated} == twice
    assert twice


def test_validations_and_ranks_are_kept(tmp_path):
    record = run_record.read_run(copied(KILLED_TWICE, tmp_path))
    assert [step.step for step in record.steps if step.val_loss is not None] == [20, 40, 60]
    assert all(known(step.validated) > known(step.t) for step in record.steps if step.val_loss is not None)
    assert [(rank.rank, rank.step) for rank in record.ranks] == [(0, 60), (1, 60)]
    assert (record.saved, record.rehearsal, record.job) == (6, True, None)
    assert record.gpus == 2


def test_a_first_step_is_steady_only_where_there_is_no_other(run):
    for step, attempt in ((1, "001"), (2, "001"), (3, "002")):
        append_line(run.path / "metrics.jsonl", {"step": step, "attempt": attempt, "step_time_s": 1.0, "loss": 1.0})
    assert [step.step for step in run_record.read_run(run).steady] == [2]
    one = RunFolder.create(run.path.parents[2] / "other", "one", facts={}, recipe_lines=[])
    append_line(one.path / "metrics.jsonl", {"step": 1, "attempt": "001", "step_time_s": 1.0})
    assert [step.step for step in run_record.read_run(one).steady] == [1]


def test_a_run_on_gpus_has_its_job_and_scores(tmp_path):
    run = made_up(tmp_path)
    (run.attempts[0].path / "logs" / "0.0.log").write_text(
        "GPU relative performance:\n  Rank=3 Node=n0 Score=0.81\n  Rank=0 Node=n0 Score=1.00\n"
    )
    record = run_record.read_run(run)
    assert record.job is not None
    assert (record.job.gpus, record.job.layout.pp, record.gpus) == (16, 2, 16)
    assert {rank.rank: rank.score for rank in record.ranks if rank.score is not None} == {0: 1.0, 3: 0.81}


def test_numbers_that_are_none_do_not_stop_a_record(run):
    append_line(run.path / "metrics.jsonl", {"step": 1, "t": None, "step_time_s": None})
    record = run_record.read_run(run)
    assert (record.steps[0].loss, record.steps[0].seconds, record.steps[0].attempt) == (None, None, "")
