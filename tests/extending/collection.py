"""Write the collection of docs/extending.md."""

import re
from pathlib import Path

from tests.conftest import ROOT

PAGE = ROOT / "docs" / "extending.md"
FILE = re.compile(r"^`acme/(?P<path>[^`]+)`:\n\n```\w+\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def write_collection(folder: Path) -> Path:
    """Write all files of the page to `folder`."""
    for match in FILE.finditer(PAGE.read_text()):
        path = folder / match["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(match["text"])
    return folder
