"""What docs/troubleshooting.md shows as output is what the commands print."""

import re
import shlex

import pytest

from tests.conftest import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
SHOWN = re.findall(r"^```\n\$ recipes (?P<words>.*)\n(?P<output>(?:.*\n)*?)```$", PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize(("words", "output"), SHOWN, ids=[words for words, _ in SHOWN])
def test_shown_output_is_real(recipes_cli, words, output):
    done = recipes_cli(*shlex.split(words), env={"COLUMNS": "200"})
    assert done.stdout == output, done.stderr


def test_there_is_something_shown():
    assert len(SHOWN) >= 4
