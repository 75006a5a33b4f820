"""Redact tokens, keys and passwords in the files of a run.

The patterns must work on Python 3.9, which has no possessive quantifiers. They still take linear time: a repeated class
is never followed by a character of the same class, and a look-behind permits only one start of a name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

REDACTED = "<redacted>"
MAX_KEY_LINES = 200
"""Maximum number of lines to redact after the start of a private key whose end is missing."""

# A name is secret if one of its words is; names are split into words at `_`, `-`, `.` and changes of case.
_SECRET_WORDS = frozenset(
    (
        *("TOKEN", "TOKENS", "SECRET", "SECRETS", "PASSWORD", "PASSWORDS", "PASSWD", "PASSPHRASE", "PASS", "PWD"),
        *("KEY", "KEYS", "APIKEY", "CREDENTIAL", "CREDENTIALS", "CREDS", "AUTH", "AUTHORIZATION", "COOKIE", "COOKIES"),
        *("BEARER", "JWT", "NETRC", "SESSION", "PAT", "PW", "SIG", "SIGNATURE"),
    )
)
_PLAIN_NAMES = frozenset({"PWD", "OLDPWD"})
_RUN_TOGETHER = re.compile(r"(?i)(token|secret|passw(or)?d|credential|api_?key|access_?key|private_?key)")
_NOT_SECRET = re.compile(
    r"(?i)^(.*_)?(NUM|MAX|MIN|TOTAL|N)_TOKENS?$|PER_TOKEN|TOKEN_(DISPATCHER|DROP|LOSS)|^SSH_AUTH_SOCK$|^XAUTHORITY$"
    r"|XDG_SESSION"
)
_TOKENIZER = re.compile(r"(?i)tokeni[sz](ers?|ation|ed)")
# Values that are never secret, and values that are not secret if the name contains `tokens`.
_PLAIN_VALUE = re.compile(r"(?i)(true|false|none|null)\Z")
_COUNT = re.compile(r"\d[\d_,.]{0,20}(e[+-]?\d{1,3})?[kKMBT]?\Z")

_VALUES = re.compile(
    r"""
    \b hf_[A-Za-z0-9]{8,} | \b api_org_[A-Za-z0-9]{8,}           # Hugging Face
    | \b wandb_v\d_[A-Za-z0-9_-]{8,}                             # Weights & Biases
    | \b sk-[A-Za-z0-9_-]{8,}                                    # OpenAI, Anthropic
    | \b gh[pousr]_[A-Za-z0-9]{8,} | \b github_pat_\w{8,}        # GitHub
    | \b glpat-[A-Za-z0-9_-]{8,}                                 # GitLab
    | \b nvapi-[A-Za-z0-9_-]{8,}                                 # NVIDIA NGC
    | \b xox[abeoprs]-[A-Za-z0-9-]{8,}                           # Slack
    | (?<= hooks\.slack\.com/services/ ) [A-Za-z0-9/]{8,}        # webhooks of Slack and Discord
    | (?<= discord\.com/api/webhooks/ ) [\w/-]{8,}
    | \b A(?:KI|SI)A[A-Z0-9]{12,}                                # AWS
    | \b AIza[A-Za-z0-9_-]{20,} | \b ya29\.[\w-]{8,} | \b GOCSPX-[\w-]{8,}   # Google
    | \b dckr_pat_[\w-]{8,} | \b npm_[A-Za-z0-9]{20,} | \b pypi-AgE[\w-]{8,}  # Docker, npm, PyPI
    | \b gsk_[A-Za-z0-9]{20,} | \b r8_[A-Za-z0-9]{20,}           # Groq, Replicate
    | \b eyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]*   # JSON web token
    """,
    re.VERBOSE,
)
_URL_USER = re.compile(
    r"""
    (?<![a-zA-Z0-9+.-]) (?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*)://
    (?P<user>
        (?![^/\s@:?\#]*[?\#]) [^/\s]*                                     # up to the last @ before a slash
        | (?!\[) [^/\s@:?\#"']*: (?!\d{1,5}[/?\#]) [^\s"'<>]{0,2000}      # password with a slash, but not a port
    )@
    """,
    re.VERBOSE,
)
_USER_ONLY = re.compile(r"(?i)(.*\+)?(ssh|sftp|rsync|abfss?|wasbs?|s3a?)\Z")  # `name@` is a user here, not a token
# `user:password@host` without a scheme: host='me:secret@db'. Line numbers, digests and mail headers are excluded.
_USER_AT_HOST = re.compile(
    r"""
    (?<![\w.+/-]) (?P<user> (?!(?i:e-?mail|mailto|cc|bcc|from|to|author|contact):) [\w.+-]{1,64}: )
    (?! \d{1,5}@ ) [^\s"'<>/:]{1,200} (?P<host> @ (?!sha\d) (?=[A-Za-z0-9\[]) )
    """,
    re.VERBOSE,
)
# Separators between the arguments of a command, also in a list: ['sshpass', '-p', 'PW'].
_GAP, _UP_TO = r"""(?:["']?,?[ \t]+["']?)""", r"""[^\n;|&]{0,200}?"""
_COMMAND = re.compile(
    rf"""
    (?P<head>
        \b sshpass {_GAP} -p (?:{_GAP})?
        | \b (?:docker|podman|nerdctl|skopeo|oras|helm|apptainer|singularity) {_GAP} {_UP_TO}
          \b login {_UP_TO} {_GAP} -p (?:{_GAP}|=)?
        | \b redis-cli {_UP_TO} {_GAP} -a {_GAP}
        | \b (?:mysql|mysqldump|mariadb) {_UP_TO} {_GAP} -p (?=[^\s"',])
        | \b curl {_UP_TO} {_GAP} (?:-u|--user|--proxy-user) (?:{_GAP}|=)? [^\s"':]{{1,64}}:
        | \b aws {_GAP} {_UP_TO} (?:secret_access_key|session_token) {_GAP}
        | \b login [ \t]+ [^\s]{{1,100}} [ \t\n]+ password [ \t]+
        | \b echo {_GAP} (?:-n {_GAP})?
          (?= [^|;&\n]{{1,200}} \| [ \t]* (?:sudo|docker|podman|wandb|hf|huggingface-cli) \b)
    )
    (?: (?<=") [^"\n]+ (?=") | (?<=') [^'\n]+ (?=') | [^\s"',;|&]+ )
    """,
    re.VERBOSE,
)
"""Commands with a password as an argument: sshpass, docker login, redis-cli, mysql, curl, aws, .netrc, a pipe."""
_KEY = re.compile(r"(?<![\w/.-])(?=[A-Za-z_-]*\d)[A-Za-z0-9_-]{20,}(?![\w/.-])")
_ASKS = rf"(?:paste (?:an?|your) (?:api key|token)|enter your (?:token|api key)|\bwandb{_GAP}login\b)"
"""Prompts after which a key may be echoed on the same or the next line, and `wandb login KEY`."""
_PROMPT = re.compile(_ASKS, re.IGNORECASE)
_AFTER_PROMPT = re.compile(rf"(?P<prompt>{_ASKS})(?P<rest>[^\n]*(?:\n[^\n]*)?)", re.IGNORECASE)
_BEARER = re.compile(r"(?i)\b(?P<scheme>bearer|basic)\s+[A-Za-z0-9+/._~-]{8,}=*")
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_AUTHORIZATION = re.compile(r"""(?i)(authorization["']?\s*[=:]\s*["']?[A-Za-z][\w-]*[ \t]+)[^\s"',;]+""")
# A name and the separator before its value; after --name, a space or a comma suffices.
_NAME = re.compile(
    r"""(?<![A-Za-z0-9_.-])(?P<name>[.-]*[A-Za-z_][A-Za-z0-9_.-]*)
    (?: ["']?\s*(?:=[=>]?|:(?!//)=?)\s* | (?P<space>["']?,?[ \t]+)(?!--) )""",
    re.VERBOSE,
)
_QUERY_VALUE = re.compile(r"""[^\s"'&#]+""")
_VALUE = re.compile(
    r"""
    (?P<double>") [^"\\\n]* (?:\\.[^"\\\n]*)* (?P<double_end>"?)
    | (?P<single>') [^'\\\n]* (?:\\.[^'\\\n]*)* (?P<single_end>'?)
    | (?P<escaped>\\+["']) (?:(?!(?P=escaped)).)* (?P<escaped_end>(?:(?P=escaped))?)
    | (?: [^\s"',;}] | ["'](?=\w) | [,;}](?=[^\s"',;}])(?![A-Za-z_][A-Za-z0-9_.-]*\s*[=:]) )+
    """,
    re.VERBOSE,
)

HINTS = (
    *sorted(word.lower() for word in _SECRET_WORDS),
    *("@", "hf_", "api_org_", "sk-", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "glpat-", "nvapi-", "xox", "hooks."),
    *("discord", "akia", "asia", "aiza"),
    *("ya29", "gocspx-", "npm_", "pypi-", "gsk_", "r8_", "eyj", "basic", "wandb", "mysql", "mariadb"),
    *("redis-cli", "docker", "podman", "nerdctl", "skopeo", "oras", "helm", "apptainer", "singularity", "curl", "echo"),
)
"""Every text with a secret contains one of these strings after conversion to lower case."""

_KEPT = re.compile(
    r"^(SLURM|SBATCH|NCCL|CUDA|CUDNN|TORCH|TORCHELASTIC|PYTORCH|NVTE|NEMO|NEMORUN|OMP|MKL|UCX|UCC|FI|IBV|MELLANOX|NVIDIA"
    r"|NVSHMEM|MASTER|GLOO|TRITON|HF|TRANSFORMERS|TOKENIZERS|WANDB|MEGATRON|SUPERPOD|ENROOT|PYXIS|PYTHON|XLA|LC)(_|[A-Z]*_|$)"
    r"|^(PATH|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|PYTHONHASHSEED|HOSTNAME|USER|LOGNAME|HOME|PWD|SHELL|LANG|TZ|TMPDIR"
    r"|VIRTUAL_ENV|CONDA_PREFIX|CONDA_DEFAULT_ENV|RANK|LOCAL_RANK|GROUP_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|HTTPS?_PROXY"
    r"|https?_proxy|no_proxy|NO_PROXY|MODULEPATH|LOADEDMODULES)$"
)


def is_secret_name(name: str) -> bool:
    """Return whether the value of a variable, key or option with this name is secret.

    True for HF_TOKEN, WANDB_API_KEY and aws.secretKey; False for KEYBOARD, PWD, TOKENIZERS_PARALLELISM and MAX_TOKENS.
    """
    if name in _PLAIN_NAMES or _NOT_SECRET.search(name):
        return False
    name = _TOKENIZER.sub("", name)
    words = re.split(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])", name)
    return any(word.upper() in _SECRET_WORDS for word in words) or bool(_RUN_TOGETHER.search(name))


def redact(mapping: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of environment variables, with values of secret names and secrets in other values redacted."""
    redacted = {}
    for name, value in mapping.items():
        redacted[name] = REDACTED if value and is_secret_name(name) else redact_text(value)
    return redacted


def redact_text(text: str) -> str:
    """Return `text` with `<redacted>` in place of every token, key and password. Idempotent.

    A search for HINTS, of which most log lines contain none, takes a thirtieth of the time of a full search.
    """
    lowercase = text.lower()
    if not any(hint in lowercase for hint in HINTS):
        return text
    return _redact_patterns(text)


def _redact_patterns(text: str) -> str:
    text = _PRIVATE_KEY.sub(REDACTED, text)
    text = _URL_USER.sub(_redact_user, text)
    text = _USER_AT_HOST.sub(rf"\g<user>{REDACTED}\g<host>", text)
    text = _COMMAND.sub(rf"\g<head>{REDACTED}", text)
    text = _AFTER_PROMPT.sub(lambda match: match["prompt"] + _KEY.sub(REDACTED, match["rest"]), text)
    text = _BEARER.sub(rf"\g<scheme> {REDACTED}", text)
    text = _AUTHORIZATION.sub(rf"\1{REDACTED}", text)
    text = _VALUES.sub(REDACTED, text)
    return _redact_assignments(text)


class LineRedactor:
    """Redacts the lines of a text in order, including private keys and answers to prompts on several lines."""

    def __init__(self) -> None:
        self._before = ""
        self._in_key = 0

    def __call__(self, line: str) -> str:
        """Return the next line with secrets redacted."""
        if self._in_key:
            self._in_key = 0 if "-----END " in line else self._in_key - 1
            return REDACTED
        if "-----BEGIN " in line and "PRIVATE KEY-----" in line and "-----END " not in line:
            self._in_key = MAX_KEY_LINES
        redacted_line = redact_with_context(self._before, line)
        self._before = line if line.strip() else self._before
        return redacted_line


def redact_with_context(before: str, line: str) -> str:
    """Return `line` with secrets redacted; `before` is the previous line, which may be a prompt for a key."""
    if _PROMPT.search(before):
        line = _KEY.sub(REDACTED, line)
    return redact_text(line)


def _redact_user(match: re.Match[str]) -> str:
    if ":" not in match["user"] and _USER_ONLY.match(match["scheme"]):
        return match[0]
    return f"{match['scheme']}://{REDACTED}@"


def _redact_assignments(text: str) -> str:
    """Return `text` with the values of secret names redacted in `NAME=value`, `"name": "value"` and `--name value`.

    Values of other names are searched, too, because they may contain a secret name.
    """
    parts, start = [], 0
    while True:
        name = _NAME.search(text, start)
        if name is None:
            break
        parts.append(text[start : name.end()])
        start = name.end()
        if not is_secret_name(name["name"]) or (name["space"] and not name["name"].startswith("--")):
            continue
        in_query = text[max(0, name.start() - 1) : name.start()] in ("?", "&")
        value = (_QUERY_VALUE if in_query else _VALUE).match(text, start)
        if value and not _is_plain(name["name"], value[0].strip("\\\"'")):
            marks = {key: mark or "" for key, mark in value.groupdict().items()}
            opening = "".join(mark for key, mark in marks.items() if not key.endswith("_end"))
            closing = "".join(mark for key, mark in marks.items() if key.endswith("_end"))
            parts.append(f"{opening}{REDACTED}{closing}")
            start = value.end()
    return "".join([*parts, text[start:]])


def _is_plain(name: str, value: str) -> bool:
    return bool(_PLAIN_VALUE.match(value) or ("tokens" in name.lower() and _COUNT.match(value)))


def environment_view(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environ` that matter for a run, such as Slurm's and NCCL's, with secrets redacted."""
    return redact({name: environ[name] for name in sorted(environ) if _KEPT.match(name)})
