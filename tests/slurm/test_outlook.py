"""Submission warns about a chain of jobs that is too short for the run."""

from superpod.slurm.submission import submit
from tests.slurm.preflight.test_preflight import case, profile


def test_short_chain_is_reported_at_submit():
    # 4 h less 300 s to start and 300 s to save are 2,760 steps of 5 s.
    long = case(max_steps=10_000).submission
    assert submit.outlook(long, 3) == (
        "10,000 steps of 5 s take 13.9 h, and 3 jobs of 4 h end at step 8,280 of 10,000: 4 are needed"
    )
    assert submit.outlook(long, 4) == ""
    assert submit.outlook(case(max_steps=10_000, time="12:00:00").submission, 2) == ""


def test_no_outlook_without_a_plan():
    assert submit.outlook(case(profile(declared_only=True), max_steps=10**9).submission, 1) == ""
    assert submit.facts(case(time="1:00").submission)["limit_s"] == 60
    assert submit.facts(case().submission)["save_s"] == 300
