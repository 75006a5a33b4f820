"""What a failed job is said to have died of."""

import pytest

from superpod.node import guard
from superpod.node.diagnose import why
from superpod.node.run_folder import RunFolder


@pytest.fixture
def attempt(tmp_path):
    return RunFolder.create(tmp_path, "tiny", facts={}, recipe_lines=[]).new_attempt()


def diagnosis(attempt, rank="", torchrun=""):
    (attempt.path / "logs" / "0.0.log").write_text(rank)
    folder = attempt.path / "nemo_run" / "x"
    folder.mkdir(parents=True)
    (folder / "stderr.log").write_text(torchrun)
    return why(RunFolder(attempt.path.parents[1]), attempt)


@pytest.mark.parametrize(
    ("rank", "torchrun", "expected"),
    [
        ("  File x\nValueError: heads 3 by tp 2\n", "", "ValueError: heads 3 by tp 2 (attempts/001/logs/0.0.log)"),
        ("", "[default0]:binascii.Error: Invalid string\n=====\n", "Error: Invalid string"),
        ("[rank1]: RuntimeError: Connection closed by peer [::1]\nTypeError: the cause\n", "", "TypeError: the cause"),
        ("TypeError: the cause\nRuntimeError: Connection reset by peer\n", "", "TypeError: the cause"),
        ("", "exitcode  : -9 (pid: 77)\n", "a rank was killed (pid 77, signal 9"),
        ("", "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 77)\n", "rank 1 was killed (pid 77, signal 9"),
        ("", "╭─ Error ─╮\n│ No such option: -n │\n╰─────╯\n======\n", "No such option: -n"),
        ("OSError: [Errno 28] No space left on device\n", "", "is full"),
        ("KeyError: 'optimizer.distributed.x from model not in state dict: [..]'\n", "", "of another TP or PP"),
        ("", "", "ended without saying why"),
    ],
)
def test_the_cause_is_named(rank, torchrun, expected, attempt):
    diagnosed = diagnosis(attempt, rank, torchrun)
    assert expected in diagnosed.cause
    assert diagnosed.known == (expected != "ended without saying why")


def test_a_long_error_is_cut(attempt):
    assert len(diagnosis(attempt, f"ValueError: {'x' * 5000}\n").cause) < 500


def test_words_of_ours_in_an_error_are_a_known_cause(attempt):
    """srun's last line stands in only where no log names a cause."""
    run = RunFolder(attempt.path.parents[1])
    (attempt.path / "logs" / "srun.log").write_text("srun: error: node2: task 3: Killed\n")
    assert guard.last_words(run, attempt, 1) == "srun: error: node2: task 3: Killed (attempts/001/logs/srun.log)"
    (attempt.path / "logs" / "0.0.log").write_text("RuntimeError: the worker ended without saying why\n")
    assert guard.last_words(run, attempt, 1).startswith("RuntimeError: the worker ended without saying why")
