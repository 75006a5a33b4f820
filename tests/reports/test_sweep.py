"""What sweep.json holds, also when somebody has edited it."""

import io
import json

import pytest
from rich.console import Console

from superpod.errors import UserError
from superpod.reports import sweep


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "runs" / sweep.FOLDER / "20261122T000000-ab"
    path.mkdir(parents=True)
    return path


def test_the_members_are_read_with_their_values(folder, tmp_path):
    row = {"run": "x/1", "overrides": ["optim.config.lr=1e-4", "a.b=c=d"]}
    (folder / sweep.FILE).write_text(json.dumps({"members": [row]}))
    values = {"optim.config.lr": "1e-4", "a.b": "c=d"}
    assert sweep.read_members(folder) == [(values, tmp_path / "runs" / "x" / "1")]


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({}, "no list of members"),
        (["x/1"], "a member without run or overrides: 'x/1'"),
        ([{"run": "x/1"}], "a member without run or overrides"),
        ([{"run": None, "overrides": []}], "a member without run or overrides"),
        ([{"run": "x/1", "overrides": "a=1"}], "a member without run or overrides"),
        ([{"run": "x/1", "overrides": ["a"]}], "an override that is not PATH=VALUE: 'a'"),
        ([{"run": "x/1", "overrides": [3]}], "an override that is not PATH=VALUE: 3"),
    ],
)
def test_odd_members_are_a_users_error_and_no_traceback(folder, members, says):
    (folder / sweep.FILE).write_text(json.dumps({"members": members}))
    with pytest.raises(UserError, match=says):
        sweep.read_members(folder)


def test_a_table_of_runs_shows_no_secret_and_no_terminal_code(folder):
    values = {"data.url": "https://user:s3cretpw@host/x", "hf_token": "hf_ABCDEFGHIJKLMNOPQRSTUVWX", "x": "\x1b[31mred"}
    rows = [sweep.Member(values, folder / "recipe" / "one", None, "gone"), sweep.Member({}, folder / "b" / "two", None)]
    screen = io.StringIO()
    Console(width=300, file=screen).print(sweep.render("2 runs", rows))
    text = screen.getvalue()
    assert "s3cretpw" not in text
    assert "hf_ABC" not in text
    assert "\x1b" not in text
    assert "host/x" in text
