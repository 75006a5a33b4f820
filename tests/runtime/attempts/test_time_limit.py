"""The limit of a running job may be extended or cut (`scontrol update TimeLimit`)."""

import time

from superpod.runtime.attempts import time_limit
from superpod.runtime.attempts.time_limit import TimeLimit
from superpod.runtime.rank import stopping
from superpod.runtime.rank.stopping import Deadline


def environment(tmp_path, at: float, rank: int = 0) -> dict[str, str]:
    (tmp_path / "attempts" / "001").mkdir(parents=True, exist_ok=True)
    return {
        "SUPERPOD_RUN_DIR": str(tmp_path),
        "SUPERPOD_ATTEMPT": "001",
        "SUPERPOD_DEADLINE": str(at),
        "SUPERPOD_SAVE_S": "10",
        "RANK": str(rank),
    }


def test_an_extended_time_limit_is_seen_by_a_training_that_runs(tmp_path):
    now = time.time()
    environ = environment(tmp_path, now + 11)
    limits = [now + 11, now + 3600]
    limit = TimeLimit(tmp_path / "attempts" / "001", lambda: limits[0])
    deadline = Deadline.from_environ(environ)
    assert deadline.is_near(1)
    limits.pop(0)
    limit._next = 0.0
    assert "time limit is now" in limit.update()
    assert limit.update() == "", "asked once a minute"
    assert not deadline.is_near(1), "the limit is looked at once more before a run stops for it"


def test_a_limit_that_was_cut_is_seen_too(tmp_path, monkeypatch):
    now = time.time()
    deadline = Deadline.from_environ(environment(tmp_path, now + 3600))
    TimeLimit(tmp_path / "attempts" / "001", lambda: now + 11)
    monkeypatch.setattr(stopping, "UPDATE_S", 0.0)
    assert deadline.is_near(1)


def test_only_rank_0_decides_by_the_limit(tmp_path):
    assert not Deadline.from_environ(environment(tmp_path, time.time() + 1, rank=1)).is_near(1)


def test_a_controller_that_does_not_answer_changes_nothing(tmp_path):
    answers = [1000.0, 0.0]
    limit = TimeLimit(tmp_path, lambda: answers.pop(0))
    limit._next = 0.0
    assert limit.update() == ""
    assert (limit.at, time_limit.read(tmp_path)) == (1000.0, 1000.0)
