"""`recipes generate` and `recipes perplexity`: what they refuse before NeMo is imported."""

import pytest


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["generate", "empty", " "], "a prompt is empty"),
        (["perplexity", "empty", "--data", "bad.jsonl"], "bad.jsonl:2"),
        (["generate", "empty", "hello"], "no checkpoint"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_user_errors_are_refused(words, says, refusal):
    assert says in refusal(*words)
