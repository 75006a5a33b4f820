"""`recipes logs` prints neither control characters nor secrets, also with --follow."""

import subprocess
import sys
import time

import pytest

from superpod.runtime.runs.run_folder import RunFolder

KEY = "0123456789abcdef0123456789abcdef01234567"
BEFORE = (
    "0: \x1b[31mred\x1b[0m\x1b]0;title\x07\x9b2J\u202e end\n"
    "0: HF_TOKEN=hf_abcdefghijklmnop\n"
    "0: hf_\x1b[0mabcdefghijklmnop\n"
    "0: sshpass -p hunter2 ssh node1\n"
    "0: wandb: Paste an API key from your profile and hit enter:\n"
    "1: between\n"
)
AFTER = f"0: {KEY}\n0: -----BEGIN RSA PRIVATE KEY-----\n1: between\n0: MIIEhunter2\n0: -----END RSA PRIVATE KEY-----\n"
SECRETS = ("hf_abc", "hunter2", KEY, "\x1b", "\x9b", "\u202e", "\x07")


@pytest.fixture
def log(tmp_path):
    run = RunFolder.create(tmp_path, "tiny", facts={"gpus_per_node": 2}, recipe_lines=[])
    path = run.new_attempt().path / "logs" / "0.log"
    path.write_text(BEFORE)
    (run.path / "slurm-7.out").write_text("export PGPASSWORD=hunter2 \x1b[2J\n")
    return path


@pytest.mark.parametrize("words", [(), ("--all",), ("--rank", "0"), ("-n", "1")], ids=" ".join)
def test_control_characters_and_secrets_are_not_printed(log, words, recipes_cli):
    with log.open("a") as file:
        file.write(AFTER)
    done = recipes_cli("logs", log.parents[3], *words)
    assert done.returncode == 0, done.stderr
    assert "[001 node 0 rank 0] <redacted>" in done.stdout
    for secret in SECRETS:
        assert secret not in done.stdout
    if "-n" not in words:
        assert "[001 node 0 rank 0] red?2J? end\n" in done.stdout
    if words == ():
        assert "[slurm-7] export PGPASSWORD=<redacted> \n" in done.stdout


def test_follow_redacts_a_key_after_its_prompt(log):
    run = log.parents[3]
    words = [sys.executable, "-m", "superpod.cli", "logs", str(run), "--follow", "--all"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        first = [process.stdout.readline() for _ in BEFORE.splitlines()]
        with log.open("a") as file:
            file.write(AFTER)
        time.sleep(0.1)
        (run / "stop").touch()
        (run / "attempts" / "001" / "result.json").write_text('{"ended": 1}')
        text = "".join(first) + process.communicate(timeout=60)[0]
    assert process.returncode == 0, text
    assert text.count("<redacted>") >= 6
    for secret in SECRETS:
        assert secret not in text
