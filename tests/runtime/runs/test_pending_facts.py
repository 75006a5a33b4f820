"""What an attempt of a killed launcher trained with is the run's; what made no step is not."""

from superpod.common.json_files import append_line
from superpod.runtime.runs import pending_facts


def test_facts_are_taken_over_once_a_step_was_made(run):
    attempt = run.new_attempt()
    pending_facts.store(attempt, {"overrides": ["trainer.max_steps=49"]}, ["trainer.max_steps = 49"])
    append_line(run.path / "metrics.jsonl", {"step": 3, "attempt": attempt.name, "loss": 1.0})
    pending_facts.apply(run)
    assert run.facts["overrides"] == ["trainer.max_steps=49"]
    assert (run.path / "recipe.txt").read_text() == "trainer.max_steps = 49\n"
    assert not (attempt.path / pending_facts.FILE).exists()


def test_facts_of_an_attempt_without_a_step_are_dropped(run):
    append_line(run.path / "metrics.jsonl", {"step": 3, "attempt": run.new_attempt().name, "loss": 1.0})
    attempt = run.new_attempt()
    pending_facts.store(attempt, {"overrides": ["model.config.hidden_dropout=2"]}, ["b = 2"])
    pending_facts.apply(run)
    pending_facts.apply(run)
    assert "overrides" not in run.facts
    assert not (attempt.path / pending_facts.FILE).exists()
