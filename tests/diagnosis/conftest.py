"""Fixtures of the tests of diagnosis/."""

import pytest

from superpod.diagnosis.log_events import read
from superpod.diagnosis.verdict import judge


@pytest.fixture
def judged(tmp_path):
    """The verdict on a text."""

    def of(text, name="body.log", **more):
        log = tmp_path / name
        log.write_bytes(text if isinstance(text, bytes) else text.encode())
        return judge([read(log)], tmp_path, **more)

    return of
