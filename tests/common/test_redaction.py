import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superpod.common import redaction
from superpod.common.redaction import (
    REDACTED,
    LineRedactor,
    environment_view,
    is_secret_name,
    redact,
    redact_text,
    redact_with_context,
)

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.SflKxwRJSMeKKF2QT4"
SECRETS = [
    "hf_abcdefghijklmnop", "sk-proj-abcdefgh12345678", "sk-ant-api03-abcdefgh", "ghp_abcdefghijklmnop1234",
    "github_pat_11ABCDEFG_abcdefgh", "glpat-abcdefgh12345678", "nvapi-abcdefgh_12345678", "AKIAIOSFODNN7EXAMPLE",
    "xoxb-123456789-abcdef", "AIzaSyA1234567890abcdefghijklm", JWT, "gho_abcdefghijklmnop", "ghs_abcdefghijklmnop",
    "api_org_abcdefghijkl", "wandb_v1_abcdefgh_12345678", "ASIAIOSFODNN7EXAMPLE", "ya29.abcdefgh-1234",
    "GOCSPX-abcdefgh", "dckr_pat_abcdefgh", "npm_abcdefghijklmnopqrstuv", "pypi-AgEIcHlwaS5vcmc",
    "gsk_abcdefghijklmnopqrstuv", "r8_abcdefghijklmnopqrstuv",
]  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "DB_PASS", "MY_APIKEY", "apiKey",
        "GOOGLE_APPLICATION_CREDENTIALS", "REGISTRY_AUTH", "SESSION_COOKIE", "github.token", "NGC_API_KEY",
        "PGPASSWORD", "aws-secret-key", "SSH_PASSPHRASE", "HUGGING_FACE_HUB_TOKEN", "PRIVATEKEY", "X_AUTHORIZATION", 
        "mysql_pwd",
    ],
)  # fmt: skip
def test_names_of_secrets(name):
    assert is_secret_name(name)
    assert redact({name: "plain"}) == {name: REDACTED}


@pytest.mark.parametrize(
    "name",
    [
        "KEYBOARD", "MONKEY_COUNT", "PWD", "OLDPWD", "TOKENIZERS_PARALLELISM", "TOKENIZER", "MAX_TOKENS", "NUM_TOKENS",
        "PATH", "AUTHOR", "COMPASS", "BYPASS", "PATTERN", "SLURM_JOB_ID", "SSH_AUTH_SOCK", "XDG_SESSION_ID", "HOSTNAME",
    ],
)  # fmt: skip
def test_names_that_are_not_secret(name):
    assert not is_secret_name(name)
    assert redact({name: "plain"}) == {name: "plain"}


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("text", ["{}", "a {} b", "URL=x?y={}&z=1", '{{"a": "{}"}}', "({})", "--flag={}", "\n{}\n"])
def test_values_with_the_pattern_of_a_secret(secret, text):
    clean = redact_text(text.format(secret))
    assert secret not in clean
    assert clean == text.format(REDACTED)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("https://user:pass@host/x", "https://<redacted>@host/x"),
        ("git clone https://me:p@ss@host.org/r.git", "git clone https://<redacted>@host.org/r.git"),
        ("postgresql+psycopg://:pw@db:5432/x", "postgresql+psycopg://<redacted>@db:5432/x"),
        ("http://host:8080/path", "http://host:8080/path"),
        ("mail a@b.org at 10:30", "mail a@b.org at 10:30"),
        ("Authorization: Bearer abcdefgh12345", "Authorization: <redacted> <redacted>"),
        ("WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567", "WANDB_API_KEY=<redacted>"),
        ("commit 0123456789abcdef0123456789abcdef01234567", "commit 0123456789abcdef0123456789abcdef01234567"),
        ("export HF_TOKEN='abc def' X=1", "export HF_TOKEN='<redacted>' X=1"),
        ('{"db_password": "hunter2", "n": 3}', '{"db_password": "<redacted>", "n": 3}'),
        ("password: hunter2", "password: <redacted>"),
        ("max_tokens=4096 tokenizer=gpt2", "max_tokens=4096 tokenizer=gpt2"),
        ("KEYBOARD=us NCCL_DEBUG=INFO", "KEYBOARD=us NCCL_DEBUG=INFO"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----\nrest", "<redacted>\nrest"),
    ],
)
def test_text(text, clean):
    assert redact_text(text) == clean


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("NEMO_URL='https://h/x?access_token=qSECRET7&sig=s'", "NEMO_URL='https://h/x?access_token=<redacted>&sig=<redacted>'"),
        ("https://h/x?page=2&sig=SECRET&z=1#top", "https://h/x?page=2&sig=<redacted>&z=1#top"),
        ("ARGS=--token=SECRET", "ARGS=--token=<redacted>"),
        ("a.b=token=SECRET", "a.b=token=<redacted>"),
        ('{"env": "A=1 DB_PASSWORD=SECRET", "n": 1}', '{"env": "A=1 DB_PASSWORD=<redacted>", "n": 1}'),
        ("recipes run --token SECRET --x 1", "recipes run --token <redacted> --x 1"),
        ("--api-key SECRET", "--api-key <redacted>"),
        ("--api-key 'SECRET more' x", "--api-key '<redacted>' x"),
        ("['--token', 'SECRET']", "['--token', '<redacted>']"),
        ("--token --verbose 3", "--token --verbose 3"),
        ("git clone https://SECRET@host/x", "git clone https://<redacted>@host/x"),
        ("https://u:SECRET/b@host/x", "https://<redacted>@host/x"),
        ("https://me@corp.org:SECRET@host/x", "https://<redacted>@host/x"),
        (r'password="a\"SECRET" x=1', 'password="<redacted>" x=1'),
        (r'{"c": "password=\"a SECRET\" x"}', r'{"c": "password=\"<redacted>\" x"}'),
        ("password=a&SECRET tail", "password=<redacted> tail"),
        ("password=a,SECRET tail", "password=<redacted> tail"),
        ("password=it'SECRET tail", "password=<redacted> tail"),
        ("{password=SECRET,user=me}", "{password=<redacted>,user=me}"),
        ("x.token='SECRET", "x.token='<redacted>"),
        ("x.token='SECRET SECRET\nrest", "x.token='<redacted>\nrest"),
        ("Authorization: Token SECRET", "Authorization: <redacted> <redacted>"),
        ("-H 'Authorization: ApiKey SECRET' x", "-H 'Authorization: <redacted> <redacted>' x"),
        ("sig=SECRET", "sig=<redacted>"),
        ("NEMO_PW=SECRET", "NEMO_PW=<redacted>"),
        ("password == SECRET", "password == <redacted>"),
        ("data.tokenizer.token=SECRET", "data.tokenizer.token=<redacted>"),
        ("password=hf_abcdefghijk/SECRET", "password=<redacted>"),
    ],
)  # fmt: skip
def test_forms_of_a_secret(text, clean):
    assert redact_text(text) == clean
    assert redact_text(clean) == clean


KEY = "0123456789abcdef0123456789abcdef01234567"
PASTE = "wandb: Paste an API key from your profile and hit enter"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("sshpass -p SECRET ssh node1", "sshpass -p <redacted> ssh node1"),
        ("sshpass -pSECRET ssh node1", "sshpass -p<redacted> ssh node1"),
        ("sshpass -p 'SECRET SECRET' ssh", "sshpass -p '<redacted>' ssh"),
        ("['sshpass', '-p', 'SECRET', 'ssh']", "['sshpass', '-p', '<redacted>', 'ssh']"),
        ("host='user:SECRET@host'", "host='user:<redacted>@host'"),
        ("db = me:SECRET@db.example:5432/x", "db = me:<redacted>@db.example:5432/x"),
        ("me:SEC@RET@10.0.0.1", "me:<redacted>@10.0.0.1"),
        (f"wandb login {KEY}", "wandb login <redacted>"),
        (f"wandb login --relogin --host=https://w.b {KEY} x", "wandb login --relogin --host=https://w.b <redacted> x"),
        (f"['wandb', 'login', '{KEY}']", "['wandb', 'login', '<redacted>']"),
        (f"{PASTE}: {KEY}", f"{PASTE}: <redacted>"),
        (f"{PASTE}, or press ctrl+c to quit:\n{KEY}\nnext", f"{PASTE}, or press ctrl+c to quit:\n<redacted>\nnext"),
        ("docker login -u me -p SECRET nvcr.io", "docker login -u me -p <redacted> nvcr.io"),
        ("echo SECRET | docker login -u '$oauthtoken' x", "echo <redacted> | docker login -u '$oauthtoken' x"),
        ("echo 'SECRET SECRET' | sudo -S mount", "echo '<redacted>' | sudo -S mount"),
        ("curl -u me:SECRET https://host/x", "curl -u me:<redacted> https://host/x"),
        ("curl -s --user 'me:SECRET' host", "curl -s --user 'me:<redacted>' host"),
        ("mysql -h db -u root -pSECRET x", "mysql -h db -u root -p<redacted> x"),
        ("redis-cli -h db -a SECRET ping", "redis-cli -h db -a <redacted> ping"),
        ("aws configure set aws_secret_access_key SECRET", "aws configure set aws_secret_access_key <redacted>"),
        ("machine api.wandb.ai login user password SECRET", "machine api.wandb.ai login user password <redacted>"),
        ("https://hooks.slack.com/services/T00/B00/SECRET00", "https://hooks.slack.com/services/<redacted>"),
        ("https://discord.com/api/webhooks/1234/SECRET-1", "https://discord.com/api/webhooks/<redacted>"),
    ],
)  # fmt: skip
def test_commands_prompts_and_addresses(text, clean):
    assert redact_text(text) == clean
    assert redact_text(clean) == clean


@pytest.mark.parametrize("secret", [*SECRETS, "user:hunter2@host", "sshpass -p hunter2", "https://u:hunter2@host"])
def test_every_secret_contains_a_hint(secret):
    assert redact_text(secret) == redaction._redact_patterns(secret) != secret


def test_a_key_after_a_prompt_in_the_previous_line_is_redacted():
    assert redact_with_context(f"{PASTE}:", f" {KEY} ") == f" {REDACTED} "
    assert redact_with_context("git rev-parse HEAD", KEY) == KEY


def test_secrets_over_several_lines_are_redacted():
    redacted = LineRedactor()
    lines = [f"{PASTE}:", "", KEY, KEY, "-----BEGIN RSA PRIVATE KEY-----", "MIIE", "-----END RSA PRIVATE KEY-----", "x"]
    assert [redacted(line) for line in lines] == [f"{PASTE}:", "", REDACTED, KEY, REDACTED, REDACTED, REDACTED, "x"]


def test_a_private_key_without_end_redacts_a_limited_number_of_lines():
    redacted = LineRedactor()
    redacted("-----BEGIN PRIVATE KEY-----")
    assert [redacted("step") for _ in range(1000)][-1] == "step"


@pytest.mark.parametrize(
    "text",
    [
        "/home/me/runs/tiny/20260102T030405Z-aaaaaa/attempts/001", "optim.config.lr=1e-3", "tokenizer=/models/llama3",
        "model.config.num_attention_heads=8", "data.tokenizer.pretrained_model_name=meta-llama/Llama-3.1-8B",
        "Tokens: 500", "tokens_per_s=1,234.5 n", "model.config.calculate_per_token_loss=True", "add_bos_token=True",
        "model.config.moe_token_dispatcher_type=alltoall", "a token a day, the password of the key",
        "recipes run tiny --data /data/x --runs /runs trainer.max_steps=20", "ssh://git@github.com/a/b.git",
        "http://host:8080/pkg@1.0", "http://[::1]:80/a@b", "https://host?to=a@b", "abfss://box@account.net/x",
        "--tokenizer /models/llama3", "tokenization=bpe", "signal=15", "C:/x", "file:///data/x@y",
        "nvcr.io/nvidia/nemo:24.07@sha256:abcdef", "nemo:24.07@sha256:abcdef", "at train.py:123@forward",
        "mailto:me@corp.org", "email:me@corp.org", "10:30@node1", "cuda:0@node1", "docker run -p 8080:80 nemo",
        "wandb: Syncing run tiny", "echo done | tee log", "curl -s host", "mysql -p db", f"wandb: run at {KEY[:12]}",
    ],
)  # fmt: skip
def test_ordinary_text_is_unchanged(text):
    assert redact_text(text) == text


def test_secrets_are_redacted_under_any_name():
    assert redact({"EXTRA_ARGS": f"--hub {SECRETS[0]}"}) == {"EXTRA_ARGS": f"--hub {REDACTED}"}
    assert redact({"HF_TOKEN": ""}) == {"HF_TOKEN": ""}


def test_environment_view_keeps_relevant_variables():
    environ = {
        "SLURM_JOB_ID": "1", "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
        "NVTE_FLASH_ATTN": "1", "NEMO_HOME": "/n", "OMP_NUM_THREADS": "1", "PATH": "/bin", "HOSTNAME": "h", "RANK": "0",
        "TORCHELASTIC_RUN_ID": "r", "PYTORCH_CUDA_ALLOC_CONF": "x:y", "MASTER_ADDR": "h", "UCX_TLS": "tcp",
    }  # fmt: skip
    dropped = {"LS_COLORS": "x", "MY_NOTES": "x", "DBUS": "x", "PATHOLOGY": "x", "SLURMY": "x"}
    hidden = {"HF_TOKEN": "x", "WANDB_API_KEY": "y", "SLURM_JWT": "z", "HTTPS_PROXY": "http://u:p@proxy:1"}
    shown = dict.fromkeys(["HF_TOKEN", "WANDB_API_KEY", "SLURM_JWT"], REDACTED)
    shown["HTTPS_PROXY"] = f"http://{REDACTED}@proxy:1"
    assert environment_view(environ | dropped | hidden) == environ | shown


words = st.text(string.ascii_uppercase + string.digits, min_size=1, max_size=6)
values = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=60)


@given(before=st.lists(words), after=st.lists(words), word=st.sampled_from(["TOKEN", "SECRET", "PASSWORD", "API_KEY"]))
def test_a_secret_word_in_a_name_redacts_the_value(before, after, word):
    name = "_".join([*(w for w in before if w not in ("N", "NUM", "MAX", "MIN", "TOTAL")), word, *after])
    assert redact({name: "hunter2"}) == {name: REDACTED}


@given(secret=st.sampled_from(SECRETS), before=values, after=values)
def test_a_secret_within_any_text_is_redacted(secret, before, after):
    assert secret not in redact_text(f"{before} {secret} {after}")


@given(text=values)
def test_redaction_is_idempotent(text):
    assert redact_text(redact_text(text)) == redact_text(text)


@given(text=st.text(string.ascii_letters + " .,\n", max_size=80))
def test_plain_words_are_unchanged(text):
    assert redact_text(text) == text


@given(environ=st.dictionaries(words, values))
def test_names_are_kept_and_the_result_is_json(environ):
    assert set(redact(environ)) == set(environ)
    assert json.loads(json.dumps(redact(environ))) == redact(environ)


@pytest.mark.parametrize(
    "text",
    [
        "a" * 50_000,
        "a:" * 20_000,
        "x=" * 20_000,
        "https://" + "a" * 50_000,
        "eyJ" * 20_000,
        "a-" * 30_000,
        "x " * 30_000,
        "-" * 50_000,
        "user:" * 9_000,
        "https://u:" * 5_000,
        "https://" + ":" * 50_000,
        "token=" * 9_000,
        "token='" * 7_000,
        "token=\\'" * 7_000,
        "token=a," * 7_000,
        "--token " * 7_000,
        "authorization: " * 4_000,
        "token" + " " * 50_000,
        "curl " * 10_000,
        "sshpass -p" * 5_000,
        "docker login " * 4_000,
        "mysql -h " * 6_000,
        "wandb login " * 4_000,
        "a:b" * 20_000,
        "u:" + "p@" * 25_000,
        "echo " * 10_000,
        "login a password " * 3_000,
    ],
)
@pytest.mark.timeout(5)
def test_redaction_takes_linear_time(text):
    redact_text(text)
