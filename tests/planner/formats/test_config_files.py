import os
from pathlib import Path

import pytest

from superpod.errors import UserError
from superpod.planner.formats.config_files import read_json, read_text


def test_a_pipe_is_no_configuration_and_nobody_waits_for_its_writer(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(UserError, match=r"config.json cannot be read: it is not a regular file"):
        read_text(tmp_path / "config.json")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "there").mkdir()
    (tmp_path / "binary").write_bytes(b"ab\xff\x00")
    (tmp_path / "cut.json").write_text('{"a": ')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("none", "none does not exist"),
        ("there", "there is a folder"),
        ("binary", "binary is not a text file: byte 3 is not UTF-8"),
        ("cut.json", "cut.json is not JSON: Expecting value"),
        ("list.json", "list.json does not contain a JSON object"),
        ("loop", "cannot be read: Too many levels of symbolic links"),
        ("run.json/x", "cannot be read: Not a directory"),
        ("n" * 300, "cannot be read: File name too long"),
        ("nul\0", "cannot be read: embedded null byte"),
    ],
)
def test_what_cannot_be_read_is_answered_with_what_to_give(folder, name, says):
    with pytest.raises(UserError) as refused:
        read_json(folder / name, "a config.json")
    assert says in str(refused.value)
    assert refused.value.hint == "pass a config.json"


def test_a_name_that_is_nearly_there_is_named(folder):
    with pytest.raises(UserError, match=r"runs\.json does not exist") as refused:
        read_text(folder / "runs.json", "a recipe")
    assert refused.value.hint == "pass a recipe; did you mean run.json?"


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_file_of_another_user_is_named(folder):
    os.chmod(folder / "run.json", 0o600)
    child = os.fork()
    if not child:
        code = 1
        try:
            os.chdir(folder)  # as root: pytest's folders above let nobody else through
            os.chmod(folder, 0o755)
            os.setresuid(65534, 65534, 65534)
            read_text(Path("run.json"))
        except UserError as refused:
            code = 0 if str(refused) == "run.json cannot be read: Permission denied" else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
