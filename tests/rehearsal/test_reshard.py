"""A checkpoint of TP 2 x PP 2 goes on, optimizer and all, as TP 1 x PP 4 and as TP 4 x PP 1."""

import pytest

from tests.rehearsal.case_client import CaseRequest, with_outcomes


@pytest.mark.nemo
@with_outcomes(CaseRequest("to-tp1pp4"), CaseRequest("to-tp4pp1"))
@pytest.mark.slow
def test_the_losses_go_on(outcome, outcomes):
    assert outcome["outcome"] == "passed", (outcome["error"], outcome["log"])
    saved = outcomes(CaseRequest("tp2pp2"))
    assert saved["outcome"] == "passed", (saved["error"], saved["log"])
    assert outcome["value"]["losses"] == pytest.approx(saved["value"]["losses"][2:], rel=1e-5)
    assert len(outcome["value"]["losses"]) == 2
