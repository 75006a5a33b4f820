"""What the lines of one log tell: of its end, of errors that quote or handle others, and of several runs in it."""

import bz2
import gzip
import lzma
import random
import re

import pytest

from superpod.diagnosis import log_lines
from superpod.diagnosis.verdict import FAILED, HEALTHY, NO_FAILURE, UNKNOWN
from superpod.runtime.attempts import diagnose
from tests.runtime.judging import OOM, STEPS, TRACEBACK, named, root_of


@pytest.mark.parametrize(
    "end",
    [
        TRACEBACK + "ValueError: x is 3\n",
        "".join(f"[rank0]: {line}\n" for line in f"{TRACEBACK}RuntimeError: x is 3".split("\n")),
        TRACEBACK + "KeyboardInterrupt\n",
        "Killed\n",
        "run.sh: line 12: 4711 Segmentation fault      (core dumped) python train.py\n",
        "srun: error: node3: task 4: Exited with exit code 1\n",
        "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-02T03:04:05 DUE TO PREEMPTION ***\n",
        "Root Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : 1 (pid: 7)\n",
        "training exited with status 1\n",
    ],
)
@pytest.mark.parametrize("phrase", ["Training complete", "Training finished!", "training done"])
def test_what_a_script_prints_after_a_fatal_end_is_no_end_of_the_training(phrase, end, judged):
    verdict = judged("".join(STEPS[:50]) + end + f"cleaning up\n{phrase}\n")
    assert verdict.state in (FAILED, UNKNOWN)
    assert verdict.root or phrase not in verdict.first_error.text


def test_an_error_that_the_training_came_through_is_no_fatal_end(judged):
    error = TRACEBACK + "ModuleNotFoundError: No module named 'wandb'\n"
    assert judged(error + "".join(STEPS[:1]) + "Training complete\n").state == HEALTHY
    assert judged("".join(STEPS[:40]) + error + "".join(STEPS[40:50]) + "Training complete\n").state == HEALTHY


@pytest.mark.parametrize("end", ["`Trainer.fit` stopped: `max_steps=40` reached.\n", "Training complete\n"])
@pytest.mark.parametrize(
    "line",
    [
        "Killed",
        "error: no model card was written",
        "fatal: not a repository",
        "upload failed: 3 of 7 files",
        "make: *** [train] Error 1",
        "could not write the summary",
        "free(): invalid pointer",
        "wandb: ERROR Error while calling the API",
        "command terminated with non-zero exit status",
    ],
)
def test_a_training_is_healthy_only_if_no_error_follows_its_last_step(line, end, judged):
    steps, later = "".join(STEPS[:40]), "cleaning up\nbye\n" * 6
    assert judged(steps + end + later).state == HEALTHY
    for log in (steps + end + line + "\n" + later, steps + line + "\n" + later + end):
        verdict = judged(log)
        assert verdict.state in (NO_FAILURE, FAILED), log
        assert verdict.root or verdict.first_error.text == line
    assert judged(steps + line + "\n" + "".join(STEPS[40:50]) + end).state == HEALTHY


@pytest.mark.parametrize(
    "line",
    [
        "srun: error: node1: task 3: Terminated",
        "W&B summary: eval/error 0.02, mean_squared_error: 0.3, failed: 0",
        "[WARNING] could not open the browser",
    ],
)
def test_some_lines_after_the_end_are_no_errors(line, judged):
    assert judged("".join(STEPS[:40]) + "Training complete\n" + line + "\n").state == HEALTHY


@pytest.mark.parametrize(
    ("error", "confidence"),
    [
        ("ValueError: the prompt has CUDA out of memory in it, which is not allowed", "possible"),
        ("ValueError: no option --on-disk-quota-exceeded: see 'Disk quota exceeded' below", "possible"),
        ("KeyError: 'no space left on device'", "possible"),
        ("NotImplementedError: to retry on 'Connection refused' is not implemented", "possible"),
        ("RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB", "certain"),
        ("OSError: [Errno 122] Disk quota exceeded: '/home/u/x'", "certain"),
        ("ValueError: OSError: [Errno 122] Disk quota exceeded: '/home/u/x'", "certain"),
        ("AssertionError: num_layers (32) must be divisible by pipeline size (3)", "certain"),
    ],
)
def test_an_error_about_values_that_quotes_a_failure_of_the_machine_is_not_sure_of_it(error, confidence, judged):
    assert root_of(judged(f"{TRACEBACK}{error}\n")).confidence == confidence


def test_an_assertion_about_a_message_is_shown_itself(judged):
    error = "AssertionError: expected 'Watchdog caught collective operation timeout' in the output"
    verdict = judged(f"{TRACEBACK}{error}\n")
    assert (verdict.state, verdict.first_error.text) == (UNKNOWN, error)


HANDLING = "\nDuring handling of the above exception, another exception occurred:\n\n"


@pytest.mark.parametrize("rank", ["", "[rank3]: "])
def test_an_exception_that_was_handled_when_another_ended_the_program_is_a_likely_cause(rank, judged):
    first, last = "ModuleNotFoundError: No module named 'apex'\n", "KeyError: 'learning_rate_schedule'\n"
    text = TRACEBACK + first + HANDLING + TRACEBACK + "TypeError: x is 3\n" + HANDLING + TRACEBACK + last
    verdict = judged("".join(rank + line for line in text.splitlines(keepends=True)))
    assert (named(verdict), root_of(verdict).confidence) == ("missing_package", "likely")
    assert verdict.ended_with.text == last.strip()


@pytest.mark.parametrize(
    "text",
    [
        TRACEBACK + OOM + HANDLING + TRACEBACK + OOM,
        TRACEBACK + OOM + HANDLING + TRACEBACK + OOM.replace("torch.OutOfMemoryError", "RuntimeError"),
        TRACEBACK + "ValueError: x is 3\n" + HANDLING + TRACEBACK + OOM,
        TRACEBACK + "KeyError: 'x'\n" + HANDLING + TRACEBACK + "TypeError: x is 3\n" + TRACEBACK + OOM,
    ],
)
def test_an_exception_that_is_raised_again_or_is_the_last_is_a_certain_cause(text, judged):
    verdict = judged(text)
    assert (named(verdict), root_of(verdict).confidence) == ("gpu_out_of_memory", "certain")
    assert verdict.ended_with is None


NEMO = [
    f"Training epoch 0, iteration {i}/99 | global_step: {i} | reduced_train_loss: {8 - i / 25}\n" for i in range(100)
]
HF = [f"{{'loss': {8 - i / 25}, 'learning_rate': 1e-05, 'epoch': {i / 100}}}\n" for i in range(1, 101)]


@pytest.mark.parametrize("run", [STEPS, NEMO, HF], ids=["Megatron", "NeMo", "Hugging Face"])
@pytest.mark.parametrize("end", ["", "Training complete\n"])
def test_the_losses_of_two_runs_in_one_log_are_not_compared(end, run, judged):
    assert judged("".join(run) + end + "".join(run) + end).state in (HEALTHY, NO_FAILURE)
    assert judged("".join(run) + end + "".join(run[:50])).state == NO_FAILURE
    assert judged("".join(run[30:]) + "Training complete\n" + "".join(run[:50])).state == NO_FAILURE
    bad = [line.replace(f"{8 - 40 / 25}", "nan").replace(f"{8 - 40 / 25:.4E}", "nan") for line in run[:42]]
    assert judged("".join(bad[:41]) + end + "".join(run)).state in (HEALTHY, NO_FAILURE)


def test_a_loss_that_rises_is_seen_across_epochs_whose_steps_begin_anew(judged):
    line = "Training epoch {}, iteration {}/49 | reduced_train_loss: {}\n"
    falls = "".join(line.format(0, i, 4 - i / 25) for i in range(49))
    rises = "".join(line.format(1, i, 2 + i / 10) for i in range(49))
    assert named(judged(falls + rises)) == "loss_diverged"


def steps_out_of_order():
    """A log of many steps, whose losses jump."""
    return "".join(random.Random(1).choice(STEPS) for _ in range(5000))


@pytest.mark.parametrize("packing", [gzip, bz2, lzma])
@pytest.mark.parametrize("damage", [lambda raw: raw[:-9], lambda raw: raw[: len(raw) // 2] + bytes(500) + raw[-9:]])
def test_an_archive_that_is_damaged_is_neither_healthy_nor_are_its_losses_judged(packing, damage, judged):
    healthy = steps_out_of_order() + "`Trainer.fit` stopped: `max_steps=100` reached.\n"
    verdict = judged(damage(packing.compress(healthy.encode())))
    assert (verdict.state, verdict.root) == (NO_FAILURE, None)
    assert "the archive is truncated or corrupt after " in verdict.words


def test_an_error_in_a_damaged_archive_is_a_cause_and_the_damage_is_told(judged):
    text = TRACEBACK + OOM + "".join(f"{random.Random(i).random()}\n" for i in range(20_000))
    verdict = judged(gzip.compress(text.encode())[:-5000])
    assert named(verdict) == "gpu_out_of_memory"
    assert re.fullmatch(r"body.log: the archive is truncated or corrupt after [\d,]+ lines", verdict.notes[0])


def test_an_archive_of_which_nothing_can_be_read_is_not_called_empty(tmp_path):
    log = tmp_path / "x.log.gz"
    log.write_bytes(gzip.compress("".join(STEPS).encode())[:300])
    assert diagnose.judge_files([log]).words.startswith("the archive is truncated or corrupt after 0 lines")


@pytest.mark.parametrize("zeros", [9, 1 << 16, (1 << 16) + 1, 5 << 20])
def test_a_log_that_was_emptied_while_it_was_written_to_is_a_log(zeros, tmp_path):
    log = tmp_path / "x.log"
    log.write_bytes(bytes(zeros) + (TRACEBACK + OOM).encode())
    assert log_lines.is_text(log)
    assert named(diagnose.judge_files([log])) == "gpu_out_of_memory"
    log.write_bytes(bytes(zeros))
    assert not log_lines.is_text(log)
