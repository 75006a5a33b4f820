"""A working directory with models, data and runs that verbs refuse before they import NeMo."""

import json

import pytest

from superpod.runtime.runs.run_folder import RunFolder
from tests.weights import tiny

SAMPLE = '{"prompt": "a", "completion": "b"}\n'


@pytest.fixture
def refusal(tmp_path, recipes_cli):
    """Call a command that must be refused with exit code 2 before it starts a run; returns its stderr.

    Its directory holds data of one sample (d.jsonl), data with an empty completion (bad.jsonl), an empty folder
    (empty), a model without weights (m), one with a key that nobody knows (strange) and a run that is not for
    fine-tuning (run).
    """
    for name, text in (("d.jsonl", SAMPLE), ("bad.jsonl", SAMPLE + '{"prompt": "a", "completion": ""}\n')):
        (tmp_path / name).write_text(text)
    (tmp_path / "empty").mkdir()
    tiny.hollow(tmp_path / "m")
    config = tiny.hollow(tmp_path / "strange") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"clip_qkv": 8.0}))
    RunFolder.create(tmp_path / "sft", "tiny_llama3_sft", facts={}, recipe_lines=["a = 1"]).path.rename(
        tmp_path / "run"
    )

    def call(*words):
        done = recipes_cli(*words, cwd=tmp_path)
        assert done.returncode == 2, done.stderr[-2000:]
        assert not (tmp_path / "runs").exists()
        return done.stderr

    return call
