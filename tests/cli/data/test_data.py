"""`recipes data`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="the [nemo] extra is not installed")

from typer.testing import CliRunner

from superpod.cli import main
from superpod.cli.data.data import app
from superpod.data.folder import DataFolder
from superpod.errors import UserError

RUN = CliRunner()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cli [red]")
    lines = [json.dumps({"body": f"document {number} of the corpus"}) for number in range(30)]
    (root / "in.jsonl").write_text("\n".join(lines) + '\n{"body": ""}\n')
    (root / "bad.jsonl").write_bytes(b"\xff")
    result = RUN.invoke(app, ["build", *_options(root)])
    assert result.exit_code == 0, result.output
    (root / "stdout").write_text(result.stdout)
    (root / "stderr").write_text(result.stderr)
    return root


def _options(root: Path) -> list[str]:
    return [
        "--text", f"{root}/in.jsonl", "--text", f"{root}/bad.jsonl", "--out", f"{root}/out", "--vocab-size", "300",
        "--json-key", "body", "--split", "8,1,1", "--workers", "1",
    ]  # fmt: skip


def _changed(options: list[str], more: list[str]) -> list[str]:
    """Replace options by those of `more`; --text and --prefix may be repeated."""
    pairs = list(zip(options[::2], options[1::2], strict=True))
    kept = [pair for pair in pairs if pair[0] not in more or pair[0] in ("--text", "--prefix")]
    return [*(word for pair in kept for word in pair), *more]


def test_build_prints_a_summary(made: Path):
    stdout = " ".join((made / "stdout").read_text().split())
    assert f"{made}/out" in stdout
    assert "documents 30 (train 24, validation 3, test 3)" in stdout
    assert "1 blank document skipped" in stdout
    stderr = (made / "stderr").read_text()
    assert "bad.jsonl is not UTF-8" in stderr
    assert "encode" in stderr
    assert "100%" in stderr


def test_a_second_build_is_up_to_date_and_json_is_pure(made: Path):
    result = RUN.invoke(app, ["build", *_options(made), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == json.loads((made / "out" / "dataset.json").read_text())
    assert RUN.invoke(app, ["build", *_options(made)]).stdout.startswith("up to date: ")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--strict"], "bad.jsonl is not UTF-8"),
        (["--vocab-size", "9"], "between 258"),
        (["--seed", "5"], "is complete"),
    ],
)
def test_user_errors_are_refused(made: Path, more: list[str], message: str):
    result = RUN.invoke(app, ["build", *_changed(_options(made), more)])
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "--workers", "100000"], "--workers is 100000"),
        (["build", "--out", "{}/in.jsonl/x"], "in.jsonl is a file, not a folder"),
        (["build", "--out", "/proc/x"], "/proc/x cannot be written"),
        (["build", "--out", "a" * 5000], "File name too long"),
        (["build", "--vocab-size", "999999999999"], "--vocab-size is 999999999999"),
        (["build", "--text", "{}/deep.jsonl"], "deep.jsonl:2: brackets or braces are nested too deeply"),
        (["add", "--out", "{}/in.jsonl/x"], "in.jsonl is a file, not a folder"),
        (["add", "--prefix", "a" * 5000], "File name too long"),
        (["add", "--index-cache", "/etc/passwd"], "/etc/passwd is a file, not a folder"),
        (["add", "--vocab-size", str(10**30)], "between 1 and 2147483647"),
    ],
    ids=range(10),
)
def test_invalid_arguments_exit_with_2(
    made: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    deep = '{"body": "a"}\n' + "[" * 100_000 + "\n"
    (made / "deep.jsonl").write_text(deep)
    verb, *more = (part.format(made) for part in arguments)
    rest = ["--prefix", f"{made}/out/text", "--tokenizer", f"{made}/out/tokenizer"] if verb == "add" else _options(made)
    rest = [*rest, "--out", f"{tmp_path}/o"] if verb == "add" else _changed(rest, ["--out", f"{tmp_path}/o"])
    whole = ["recipes", "data", verb, *_changed(rest, more)]
    monkeypatch.setattr(sys, "argv", whole)
    with pytest.raises(SystemExit) as ended:
        main()
    stderr = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in "".join(stderr.split("\n"))
    assert "Traceback" not in stderr
    assert "internal error" not in stderr


def test_add(made: Path, tmp_path: Path):
    result = RUN.invoke(
        app,
        ["add", "--out", f"{tmp_path}/o", "--prefix", f"{made}/out/text", "--tokenizer", f"{made}/out/tokenizer",
         "--split", "1,1,0", "--index-cache", f"{tmp_path}/cache", "--json"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    folder = DataFolder.load(tmp_path / "o", verify_sha=True)
    assert json.loads(result.stdout) == json.loads(json.dumps(folder.as_json()))
    assert (folder.documents, folder.split, folder.index_cache) == (30, "1,1,0", f"{tmp_path}/cache")


def test_help_is_light():
    code = (
        "import sys; from superpod.cli.data import data; from typer.testing import CliRunner\n"
        "assert CliRunner().invoke(data.app, ['build', '--help']).exit_code == 0\n"
        "print(*{'numpy', 'torch', 'tokenizers', 'transformers', 'nemo'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
