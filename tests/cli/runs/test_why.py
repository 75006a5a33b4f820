"""`recipes why`: its output, JSON, exit codes and refusals."""

import gzip
import json
import os
from pathlib import Path

import pytest

from superpod.cli import main
from superpod.runtime.runs.run_folder import RunFolder
from tests.conftest import ROOT

CORPUS = ROOT / "tests" / "diagnosis" / "why_corpus"
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB. GPU 3 has a total capacity of 79.11 GiB "
    "of which 1.85 GiB is free. Of the allocated memory 73.30 GiB is allocated by PyTorch, and 611.20 MiB is "
    "reserved by "
    "PyTorch but unallocated."
)


@pytest.fixture
def why(monkeypatch, capsys):
    """Call the verb in this process; returns its exit code, stdout and stderr."""

    def call(*words):
        monkeypatch.setattr("sys.argv", ["recipes", "why", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        return end.value.code or 0, printed.out, printed.err

    return call


def plan(layout, **query):
    return json.dumps({"schema": 1, "candidates": 1, "query": query, "layouts": [{"layout": layout}]})


@pytest.fixture
def run(tmp_path):
    run = RunFolder.create(tmp_path, "llama3_70b", facts={}, recipe_lines=[])
    layout = {"tp": 4, "pp": 4, "sp": True, "gbs": 128, "mbs": 1}
    query = {"model": "llama3_70b", "gpu": "h100", "fabric": None, "gpus": 32, "seq": 8192, "precision": ["bf16"]}
    (run.path / "plan.json").write_text(plan(layout, **query))
    return run


def test_a_log_gets_cause_evidence_and_fix(why):
    code, out, _ = why(CORPUS / "ib_retry_exceeded.log")
    assert code == 0
    assert "cause    ib_link, rank 4" not in out
    assert "cause    ib_link" in out
    assert "Got completion from peer" in out
    assert "next     `recipes cluster bisect" in out
    assert "follows  nccl_remote_gone" in out


def test_out_of_memory_is_compared_with_the_plan_and_gets_the_cheapest_fix(why, run):
    attempt = run.new_attempt()
    (attempt.path / "logs" / "1.log").write_text(f"9: Traceback (most recent call last):\n9: {OOM}\n8: hello\n")
    attempt.finish("failed", message="x")
    code, out, _ = why(run.path)
    assert code == 0
    assert "cause    gpu_out_of_memory, rank 9: " in out
    assert "short by 1.6 GiB" in out
    assert "planned: " in out
    assert "rank 9 is on pipeline stage 1 of 4" in out
    assert "actual: 73.3 GiB allocated when it failed" in out
    assert "next     cp 2 frees " in out


@pytest.mark.parametrize(("job", "is_local"), [("", True), ("123", False)])
def test_an_interrupted_local_run_is_not_told_to_use_slurm(why, run, job, is_local):
    attempt = run.new_attempt(job=job)
    (attempt.path / "logs" / "1.log").write_text("0: Traceback (most recent call last):\n0: KeyboardInterrupt\n")
    attempt.finish("cancelled", message="x")
    _, out, _ = why(run.path)
    assert "cause    cancelled" in out
    assert ("sacct" in out) is not is_local
    assert (f"next     `recipes run llama3_70b --resume {run.path}` resumes it" in out) is is_local


def test_a_run_without_a_plan_is_explained(why, run):
    (run.path / "plan.json").unlink()
    attempt = run.new_attempt()
    (attempt.path / "logs" / "0.0.log").write_text(f"Traceback (most recent call last):\n{OOM}\n")
    code, out, _ = why(run.path, "--json")
    (answer,) = json.loads(out)
    assert code == 0
    assert (answer["schema"], answer["state"], answer["attempt"]) == (1, "failed", "001")
    assert answer["root"]["name"] == "gpu_out_of_memory"
    assert answer["root"]["ranks"] == [0]
    assert answer["root"]["evidence"][0]["path"] == "attempts/001/logs/0.0.log"
    assert answer["root"]["evidence"][0]["number"] == 2
    assert "not compared with a plan" in answer["root"]["detail"]


def test_an_unknown_cause_exits_with_1_and_the_first_error(why, tmp_path):
    log = tmp_path / "a log.txt"
    frame = '  File "a.py", line 3, in f\n    g(weights)\n'
    log.write_text(f"Traceback (most recent call last):\n{frame}my.OwnError: three weights for two prefixes\n")
    code, out, _ = why(log)
    assert code == 1
    assert "unknown  the cause is not known" in out
    assert f"{log}:4: my.OwnError: three weights for two prefixes\n         raised in a.py f: g(weights)\n" in out


def test_a_possible_error_after_the_end_of_a_training_is_shown(why, tmp_path):
    log = tmp_path / "a.log"
    log.write_text("step 1 loss 3.1\nTraining complete\nerror: no card was written\nbye\n")
    code, out, _ = why(log)
    assert code == 0
    assert "no failure found  its last step is 1; the log reports the end of training" in out
    assert f"this line may report an error:\n         {log}:3: error: no card was written" in out


def test_a_healthy_log_and_a_done_run(why, run):
    code, out, _ = why(CORPUS / "healthy" / "megatron_fp16_start.log")
    assert (code, "healthy  " in out) == (0, True)
    run.new_attempt().finish("failed", message="a disk is full [disk_full]")
    attempt = run.new_attempt()
    (run.path / "done").write_text("{}")
    attempt.finish("done")
    code, out, _ = why(run.path)
    assert code == 0
    assert "healthy  the run is done" in out
    assert "attempt 001: failed, a disk is full [disk_full]" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "nowhere is neither a run folder nor a log"),
        (["{folder}"], "no log"),
        (["{run}", "--attempt", "7"], "has no attempt 7"),
        (["{log}", "--attempt", "1"], "--attempt applies only to run folders"),
    ],
)
def test_other_paths_are_refused(words, says, why, run, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "log.txt").write_text("x\n")
    places = {"folder": tmp_path / "folder", "run": run.path, "log": tmp_path / "log.txt"}
    code, _, err = why(*(word.format(**places) for word in words))
    assert code == 2
    assert says in err
    assert "  next: " in err


def test_status_and_history_show_the_same_root(why, run):
    from superpod.reports.runs import attempts
    from superpod.runtime.attempts import diagnose

    attempt = run.new_attempt()
    (attempt.path / "logs" / "0.0.log").write_text("OSError: [Errno 122] Disk quota exceeded\n")
    attempt.finish("failed", message=diagnose.summarize(run, attempt).cause)
    _, out, _ = why(run.path, "--json")
    root = json.loads(out)[0]["root"]["name"]
    assert root == "quota"
    assert run.status().message.endswith(f"[{root}]")
    assert attempts.read_attempt(attempt).message.endswith(f"[{root}]")


def test_a_binary_file_is_refused(why, tmp_path):
    code, out, err = why("/bin/ls")
    assert (code, out) == (2, "")
    assert "/bin/ls is not a log" in err
    (tmp_path / "zeros.log").write_bytes(bytes(5000))
    (tmp_path / "random.log.gz").write_bytes(gzip.compress(os.urandom(50_000)))
    for name in ("zeros.log", "random.log.gz"):
        assert f"{name} is not a log" in why(tmp_path / name)[2]
    assert "no log" in why(tmp_path)[2]


def test_logs_with_other_encodings_colors_and_null_bytes_are_read(why, tmp_path):
    words = ["RuntimeError: 训练失败", "\x1b[31mred\x1b[0m " * 500 + "\a\r 10%"]
    for number, text in enumerate((words[0].encode("gbk") * 400, words[1].encode(), bytes(3000) + b"it began\n")):
        log = tmp_path / f"{number}.log"
        log.write_bytes(text)
        assert "is not a log" not in why(log)[2]
    (tmp_path / "a.out").write_bytes(Path("/bin/ls").read_bytes())
    code, out, _ = why(tmp_path)
    assert code in (0, 1)
    assert "a.out" not in out


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_an_empty_log_has_an_unknown_cause(content, why, tmp_path):
    for name in ("a.log", "b.log"):
        (tmp_path / name).write_text(content)
    code, out, _ = why(tmp_path / "a.log")
    assert code == 1
    assert "unknown  the log is empty, so this run cannot be diagnosed" in out
    assert "next     pass a non-empty log" in out
    assert "healthy" not in out
    assert "all 2 logs are empty" in why(tmp_path)[1]
    (tmp_path / "b.log").write_text("a line\n")
    assert "no failure found" in why(tmp_path)[1]


def test_evidence_redacts_a_key_after_its_prompt(why, tmp_path):
    key = "0123456789abcdef0123456789abcdef01234567"
    lines = ["wandb: Paste an API key from your profile and hit enter:", f"RuntimeError: {key}", "sshpass -p hunter2 x"]
    (tmp_path / "a.log").write_text("Traceback (most recent call last):\n" + "\n".join(lines) + "\n")
    _, out, _ = why(tmp_path / "a.log")
    assert "RuntimeError: <redacted>" in out
    assert key not in out
