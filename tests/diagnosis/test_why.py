"""Why runs failed: every log of the corpus is given its cause, and no healthy one is blamed.

The first lines of a log of `why_corpus` name its cause, and whether it was PROVOKED here, and how, or written AFTER the
messages in a public thread, and which.
"""

import bz2
import gzip
import json
import lzma
import os
import random
import re
import time
from pathlib import Path

import pytest

from superpod.diagnosis import causes, log_events, log_lines, losses, oom
from superpod.diagnosis.log_events import read
from superpod.diagnosis.verdict import FAILED, HEALTHY, NO_FAILURE, SUSPECT, UNKNOWN, judge
from superpod.runtime.attempts import diagnose
from superpod.runtime.runs.run_folder import RunFolder
from tests.runtime.judging import OOM, TRACEBACK, named, root_of

CORPUS = Path(__file__).parent / "why_corpus"
LOGS = sorted(path for path in CORPUS.rglob("*.log"))
MESSAGES = [json.loads(line) for line in (Path(__file__).parent / "why_messages.jsonl").read_text().splitlines()]
"""Messages as the libraries' sources have them, of more versions and wordings than the corpus."""


def header(path):
    """The cause that a log of the corpus has, where it comes from, and the log itself."""
    lines = path.read_text().split("\n")
    heads = [line.removeprefix("#: ") for line in lines if line.startswith("#: ")]
    return heads[0].removeprefix("cause "), heads[1], "\n".join(lines[len(heads) :])


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_every_log_is_given_its_cause(path, judged):
    cause, _, text = header(path)
    verdict = judged(text)
    assert named(verdict) == cause, (verdict.root, verdict.first_error)
    if verdict.root:
        first = root_of(verdict).evidence[0]
        assert first.number
        assert root_of(verdict).fix
        assert first.text


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message["cause"])
def test_other_words_of_a_cause_are_known_too(message, judged):
    verdict = judged(message["log"])
    assert named(verdict) == message["cause"], (verdict.root, verdict.first_error)


def test_the_corpus_is_what_the_issue_asks_for():
    """60 logs of failures, 20 healthy ones, each provoked or after a thread, over half of the causes."""
    heads = [header(path)[:2] for path in LOGS]
    failed = [cause for cause, _ in heads if cause not in (HEALTHY, NO_FAILURE)]
    assert len(failed) >= 60
    assert len(heads) - len(failed) >= 20
    assert all(re.match(r"PROVOKED .|AFTER https://github\.com/\S+/(issues|pull)/\d+$", source) for _, source in heads)
    assert len(causes.ALL) >= 50
    assert len(set(failed) - {UNKNOWN}) >= 50
    assert set(failed) - {UNKNOWN} <= set(causes.CAUSES_BY_NAME)


def test_the_commands_of_the_fixes_are_verbs():
    from typer.main import get_command

    from superpod.cli.app import app

    for cause in causes.ALL:
        for words in re.findall(r"`recipes ([^`]*)`", cause.fix):
            known = getattr(get_command(app), "commands", {})
            for word in words.split():
                assert not known or word in known, (cause.name, words)
                known = getattr(known.get(word), "commands", {})


def test_the_table_of_causes_holds_together():
    assert len(causes.CAUSES_BY_NAME) == len(causes.ALL)
    for cause in causes.ALL:
        assert set(cause.follows) <= {*causes.CAUSES_BY_NAME, log_events.PROGRAM_ERROR} - {cause.name}, cause.name
        assert cause.means[0].islower() or cause.means[:2] in ("NC", "CU", "Sl", "In", "NV", "/d", "GP"), cause.means
        for sign in cause.patterns:
            assert sign.phrase == sign.phrase.lower(), sign
            assert len(sign.phrase) >= 2
            re.compile(sign.pattern)


@pytest.mark.parametrize(
    "prefix", ["[rank5]: ", "[default5]:[rank5]: ", "5: ", "[1,5]<stderr>:", "2026-11-23T03:04:05Z [rank5]: "]
)
def test_the_rank_is_read_from_what_a_launcher_puts_before_a_line(prefix, judged):
    lines = [
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in <module>',
        "    f()",
        "ValueError: x is 3",
    ]
    verdict = judged("\n".join(prefix + line for line in lines) + "\n")
    assert verdict.state == UNKNOWN
    assert (verdict.first_error.text, verdict.first_error.rank, verdict.first_error.number) == (
        "ValueError: x is 3",
        5,
        4,
    )


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ("(worker6, rank=6, pid=8930, ip=10.0.0.7) ValueError: x is 3", 6),
        ("(WorkerDict pid=8930, ip=10.0.0.7) [rank2]: ValueError: x is 3", 2),
        ("[36m(RayTrainWorker pid=12)[0m ValueError: x is 3", None),
        ("[1,mpirank:3,algo-1]<stderr>:ValueError: x is 3", 3),
        ("[prterun-node7-99@1,4]<stderr>: ValueError: x is 3", 4),
        ("[pod/job-0/pytorch] 2026-01-02T03:04:05Z ValueError: x is 3", None),
        ("  3%|#         | 3/100 [00:01<00:40,  2.4it/s]ValueError: x is 3", None),
        ("Loading: 100%|####| 2/2 [00:01<00:00]  5%|#  | 1/20 [00:01<?, loss=2]ValueError: x is 3", None),
    ],
)
def test_an_error_behind_a_prefix_or_a_progress_bar_is_read(line, rank, judged):
    verdict = judged(line + "\n")
    assert (verdict.state, verdict.first_error.text, verdict.first_error.rank) == (UNKNOWN, "ValueError: x is 3", rank)


def test_a_full_dev_shm_is_told_from_a_full_disk_by_the_call_that_failed(judged):
    error = "OSError: [Errno 28] No space left on device\n"
    start = "Traceback (most recent call last):\n"
    semaphore = (
        '  File "/usr/lib/python3.11/multiprocessing/synchronize.py", line 57, in __init__\n    sl = SemLock(kind)\n'
    )
    file = '  File "/opt/train.py", line 57, in save\n    out.write(data)\n'
    assert named(judged(start + semaphore + error)) == "shared_memory_full"
    assert judged(start + semaphore + error).follows == (), "the line of the root is no evidence of another cause"
    assert named(judged(start + semaphore + error + start + file + error)) == "shared_memory_full"
    assert named(judged(start + file + error)) == "disk_full"


def test_an_embedding_of_another_size_in_the_checkpoint_is_not_certainly_the_data_s_vocabulary(judged):
    error = (
        "megatron.core.dist_checkpointing.core.CheckpointingException: Global shape mismatch for loaded "
        "(torch.Size([128256, 4096])) and expected ((32000, 4096)) tensor for key embedding.word_embeddings.weight\n"
    )
    assert root_of(judged(error)).confidence == "likely"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("CRLF", OOM.replace("\n", "\r\n").encode()),
        ("colours", f"\x1b[31m\x1b[1m{OOM.strip()}\x1b[0m\n".encode()),
        ("binary before and after", bytes(range(256)) * 300 + b"\n" + OOM.encode() + bytes(reversed(range(256))) * 300),
        (
            "a progress bar on the same line",
            b"  1%| | 1/100 [00:01<1:00, 2it/s]\r  2%| | 2/100 [00:02<1:00]\r" + OOM.encode(),
        ),
        ("JSON of Docker", json.dumps({"log": OOM, "stream": "stderr", "time": "2026-01-02T03:04:05Z"}).encode()),
        ("gzip", gzip.compress(OOM.encode())),
        ("gzip that is cut off", gzip.compress(OOM.encode() + os.urandom(99999))[:-5000]),
        ("bzip2", bz2.compress(OOM.encode())),
        ("xz", lzma.compress(OOM.encode())),
        ("no line end", OOM.strip().encode()),
        ("one line of a megabyte", b"x" * (1 << 20) + b"\n" + OOM.encode()),
    ],
)
def test_a_log_is_read_however_it_is_written(kind, text, judged):
    assert named(judged(text)) == "gpu_out_of_memory", kind


def test_healthy_is_only_a_log_with_the_end_of_its_training(judged):
    step = " iteration       {}/      12 | lm loss: 2.5 | grad norm: 0.3 |\n"
    assert judged("".join(step.format(i) for i in range(1, 9))).state == NO_FAILURE
    assert judged("".join(step.format(i) for i in range(1, 13))).state == HEALTHY
    unexplained = judged(step.format(1) + "ERROR: the frobnicator has stopped\n")
    assert (unexplained.state, unexplained.first_error.text) == (UNKNOWN, "ERROR: the frobnicator has stopped")


def test_a_warning_in_the_very_last_line_is_a_possible_cause_only_while_nothing_follows(judged):
    warning = "transformer_engine failed to import with exception libcudnn.so.9: cannot open shared object file\n"
    verdict = judged(warning)
    assert (verdict.state, named(verdict), root_of(verdict).confidence) == (SUSPECT, "missing_package", "possible")
    assert judged(warning + "loading the data\n").state == NO_FAILURE


def test_a_traceback_that_is_cut_off_is_a_failure(judged):
    assert judged("step 3: loss 2.5\nTraceback (most recent call last):\n").state == UNKNOWN


def test_a_message_above_a_generic_error_is_its_possible_cause(judged):
    message = "Dataset does not exist: /data/my_text\n"
    follow = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n{}\n'
    verdict = judged(message + follow.format("AttributeError: 'NoneType' object has no attribute 'sizes'"))
    assert (verdict.state, named(verdict), root_of(verdict).confidence) == (FAILED, "data_missing", "possible")
    assert judged(message + follow.format("my.OwnError: the blend has 3 weights")).state == UNKNOWN


def test_only_the_innermost_frames_of_an_error_hint_at_its_cause(judged):
    frames = [
        '  File "/opt/lib/site-packages/jsonargparse/_cli.py", line 9, in CLI\n    return run(config)\n',
        '  File "a.py", line 1, in f\n    g(x)\n',
        '  File "a.py", line 5, in g\n    raise OwnError(x)\n',
    ]
    start, end = "Traceback (most recent call last):\n", "my.OwnError: three weights\n"
    verdict = judged(start + "".join(frames) + end)
    assert verdict.state == UNKNOWN
    assert verdict.first_error.frame == "a.py g: raise OwnError(x)"
    verdict = judged(start + "".join(frames[1:] + frames[:1]) + end)
    assert (named(verdict), root_of(verdict).confidence) == ("wrong_option", "possible")


def test_what_a_message_prints_of_a_dictionary_is_no_hint_at_its_cause(judged):
    assert judged(TRACEBACK + "my.OwnError: {'shape': (4,), 'checkpoint': None}\n").state == UNKNOWN
    assert named(judged(TRACEBACK + "my.OwnError: the shape is (4,)\n")) == "shapes"


def test_the_report_of_a_launcher_is_not_the_error_above_it(judged):
    report = "srun: error: node1: task 0: Exited with exit code 1\n"
    verdict = judged("slurmstepd: error: the prolog of the task printed nothing\n" + report)
    assert verdict.first_error.text == "slurmstepd: error: the prolog of the task printed nothing"
    assert named(judged("slurmstepd: error: pyxis: the filter is not implemented\n" + report)) == "container_start"


def test_the_raise_statement_of_a_cut_off_traceback_is_read(judged):
    frame = '  File "a.py", line 1, in f\n    raise KeyError("Missing key in checkpoint state_dict: x")\n'
    verdict = judged("Traceback (most recent call last):\n" + frame)
    assert (verdict.state, named(verdict), root_of(verdict).confidence) == (
        FAILED,
        "checkpoint_other_model",
        "certain",
    )


def test_steps_skipped_at_the_minimum_loss_scale_are_an_overflow(judged):
    skipped = "[INFO] [stage2.py:1628:step] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 1, reducing to 1\n"
    lowered = skipped.replace("scale: 1, reducing to 1", "scale: 65536, reducing to 32768")
    assert named(judged(lowered + skipped * 3)) == "fp16_overflow"
    assert judged(lowered * 3).state == NO_FAILURE
    assert named(judged(lowered * 5)) == "fp16_overflow"
    steps = "".join(f" iteration {i}/ 99 | lm loss: 2.5 |\n" for i in range(1, 4))
    assert judged(skipped * 3 + steps).state == NO_FAILURE


def test_certain_is_only_a_cause_without_a_rival(judged):
    divisibility = "[rank1]: AssertionError: num_layers (32) must be divisible by pipeline size (3)\n"
    permission = "[rank2]: PermissionError: [Errno 13] Permission denied: '/data'\n"
    assert root_of(judged(divisibility)).confidence == "certain"
    assert root_of(judged(divisibility + permission)).confidence == "likely"


def test_a_loss_that_is_nan_is_seen_in_a_log_of_three_lines(judged):
    assert named(judged("loading\nstarting training\nloss: nan\n")) == "loss_is_nan"


_FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.10 GiB is "
    "free. "
)


@pytest.mark.parametrize(
    ("figures", "cause"),
    [
        # A container's own process under another number, and an impossible size or none for it.
        ("Process 7 has 0 bytes memory in use. Of the allocated memory 70.00 GiB is allocated by PyTorch, ", None),
        ("this process has 0 bytes memory in use. Of the allocated memory 70.00 GiB is allocated by PyTorch, ", None),
        (
            "Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use. "
            "Of the allocated memory 70.00 GiB is allocated by PyTorch, ",
            None,
        ),
        (
            "Process 7 has 40.00 GiB memory in use. Including non-PyTorch memory, this process has 37.00 GiB memory in "
            "use. Of the allocated memory 35.00 GiB is allocated by PyTorch, ",
            "gpu_memory_taken",
        ),
        (
            "Including non-PyTorch memory, this process has 77.00 GiB memory in use. Of the allocated memory 68.00 GiB "
            "is allocated by PyTorch, with 6.00 GiB allocated in private pools (e.g., CUDA Graphs), ",
            None,
        ),
    ],
)
def test_other_processes_are_blamed_only_where_the_figures_show_them(figures, cause):
    parsed = oom.parse(_FULL + figures + "and 1.50 GiB is reserved by PyTorch but unallocated.")
    assert parsed
    assert parsed.cause == (cause or "gpu_out_of_memory")


def test_a_log_of_nothing_but_bytes_blames_nobody(judged):
    assert judged(random.Random(4711).randbytes(300_000)).state == NO_FAILURE
    assert judged(b"").state == NO_FAILURE


def test_what_follows_is_kept_from_the_root(judged):
    """A dead rank; the timeout of those that wait for it; srun that ends them."""
    lines = [
        "[rank3]: Traceback (most recent call last):",
        f"[rank3]: {OOM.strip()}",
        "[rank0]:[E321 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=1) ran for 600060 milliseconds before timing out.",
        "[rank1]: torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited or there was a "
        "network error, NCCL version 2.21.5",
        "srun: error: node1: task 0: Aborted (core dumped)",
        "srun: Force Terminated StepId=160.0",
    ]
    verdict = judged("\n".join(lines))
    assert (named(verdict), root_of(verdict).ranks) == ("gpu_out_of_memory", (3,))
    assert {f.name for f in verdict.follows} == {"nccl_timeout", "nccl_remote_gone", "rank_aborted", "terminated"}
    assert verdict.others == ()


def test_an_error_before_the_time_limit_is_the_root_and_one_after_it_is_not(judged):
    error = "[rank3]: Traceback (most recent call last):\n[rank3]: KeyError: 'lr'\n"
    limit = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-04-20T09:09:37 DUE TO TIME LIMIT ***\n"
    before = judged(error + limit)
    assert (before.state, before.first_error.text) == (UNKNOWN, "KeyError: 'lr'")
    assert [finding.name for finding in before.follows] == ["time_limit"]
    assert (
        named(judged(limit + "[rank3]: ConnectionResetError: [Errno 104] Connection reset by peer\n")) == "time_limit"
    )


def test_unknown_says_so_and_shows_the_first_error_of_the_rank_that_failed_first(judged):
    """torchrun names that rank; another one printed its error before."""
    text = (
        "[rank0]: Traceback (most recent call last):\n[rank0]: RuntimeError: too bad\n"
        "[rank1]: Traceback (most recent call last):\n[rank1]: my.OwnError: the blend has 3 weights\n"
        "Root Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : 1 (pid: 7)\n"
    )
    verdict = judged(text)
    assert verdict.state == UNKNOWN
    assert (verdict.first_error.rank, verdict.first_error.text) == (1, "my.OwnError: the blend has 3 weights")


def test_secrets_stay_out_of_the_evidence(judged):
    verdict = judged(
        "Traceback (most recent call last):\nOSError: 401 Client Error: HF_TOKEN=hf_abcdefghijklmnop is no token\n"
    )
    assert named(verdict) == "missing_token"
    assert "hf_abc" not in str(verdict)


def test_out_of_memory_is_told_by_its_figures():
    verdict = oom.parse(OOM)
    assert verdict
    assert (verdict.gpu, verdict.cause) == (3, "gpu_out_of_memory")
    assert verdict.shortage == pytest.approx((4.0 - 1.85) * 2**30)
    assert "short by 2.1 GiB" in verdict.summary
    assert oom.parse("CUDA error: out of memory") is None


def steps(values):
    series = losses.Series()
    for step, loss in enumerate(values, 1):
        series.add_line(log_lines.LogLine(Path("x"), step, f"iteration {step}/ 500 | lm loss: {loss} |"))
    return [anomaly.cause for anomaly in series.anomalies()]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([11 * 0.98**i + 2 for i in range(100)], []),
        ([3 + (-1) ** i * 0.4 for i in range(100)], []),
        ([11 * 0.9**i + 2 for i in range(50)] + ["nan"] * 5, ["loss_is_nan"]),
        ([3.0] * 20 + ["nan"] + [3.0] * 20, []),
        ([2.5 + i % 3 / 50 for i in range(50)] + [9.0] + [2.5] * 30, ["loss_spike"]),
        ([8 * 0.9**i + 2 for i in range(60)] + [2 + i * 0.1 for i in range(40)], ["loss_diverged"]),
        ([3.0, 9.0, 2.0], []),
    ],
)
def test_losses_that_go_wrong_are_told_from_noise(values, expected):
    assert steps(values) == expected


def test_numbers_that_are_wrong_do_not_make_a_run_failed(judged):
    text = "".join(f"iteration {i}/ 99 | lm loss: {9.0 if i == 60 else 2.5} |\n" for i in range(1, 100))
    verdict = judged(text)
    assert (verdict.state, named(verdict)) == (SUSPECT, "loss_spike")
    assert "at step 60" in root_of(verdict).detail


def test_a_folder_of_rank_logs_is_one_run(tmp_path):
    for rank in range(8):
        folder = tmp_path / f"attempt_0/{rank}"
        folder.mkdir(parents=True)
        error = OOM if rank == 5 else "RuntimeError: Connection reset by peer\n"
        (folder / "stderr.log").write_text(f"Traceback (most recent call last):\n{error}")
    verdict = diagnose.judge_files(sorted(tmp_path.rglob("*.log")), tmp_path)
    assert (named(verdict), root_of(verdict).ranks) == ("gpu_out_of_memory", (5,))
    assert root_of(verdict).evidence[0].location == "attempt_0/5/stderr.log:2"
    assert verdict.follows[0].ranks == (0, 1, 2, 3, 4, 6, 7)


def test_a_line_that_stands_once_in_a_large_log_is_not_missed(tmp_path):
    """12 MiB here; a gigabyte takes a minute (measured by hand, see docs/LOG.md)."""
    log, line = tmp_path / "large.log", "2026-01-01 00:00:00 INFO step {0} loss 2.5 on node{1} at {2:.3f} tokens/s\n"
    with log.open("w") as file:
        for i in range(140_000):
            file.write(line.format(i, i % 16, i / 7))
            if i == 70_000:
                file.write("Traceback (most recent call last):\nOSError: [Errno 28] No space left on device\n")
    began = time.monotonic()
    assert named(judge([read(log)])) == NO_FAILURE, "the training went on"
    assert time.monotonic() - began < 30
    with log.open("a") as file:
        file.write("[rank7]: OSError: [Errno 122] Disk quota exceeded\n")
    verdict = judge([read(log)])
    assert (named(verdict), root_of(verdict).ranks) == ("quota", (7,))
    assert root_of(verdict).evidence[0].number == 140_003


def test_the_short_form_has_the_root_of_the_long_one(tmp_path):
    run = RunFolder.create(tmp_path, "tiny", facts={}, recipe_lines=[])
    attempt = run.new_attempt()
    (attempt.path / "logs" / "0.0.log").write_text(f"Traceback (most recent call last):\n{OOM}")
    attempt.finish("failed", message=diagnose.summarize(run, attempt).cause)
    assert attempt.result["message"].endswith("[gpu_out_of_memory]")
    assert root_of(diagnose.judge_attempt(run, attempt)).name == "gpu_out_of_memory"
    assert diagnose.judge_attempt(run, attempt).state == FAILED
