"""Conversions are checked before NeMo is imported."""

import json

import pytest

from superpod.errors import UserError
from superpod.launch import convert
from tests.weights import tiny


def test_conversion_exceeding_memory_is_refused(tmp_path):
    job = convert.plan_conversion(tiny.hollow(tmp_path / "m"), tmp_path / "out")
    assert 1.0 < job.gib < 1.1
    convert.require_memory(job.gib, "m")
    with pytest.raises(UserError, match=r"needs about 999999 GiB of memory .* GiB are free"):
        convert.require_memory(999_999.0, "m")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"attention_bias": True}, "attention_bias is True and mlp_bias is False"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_scaling has type 'yarn'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures is"),
    ],
)
def test_failed_forward_check_writes_nothing(keys, says, tmp_path):
    folder = tiny.hollow(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))
    with pytest.raises(UserError, match=says):
        convert.plan_conversion(folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_forward_check_is_optional(tmp_path):
    folder = tiny.hollow(tmp_path / "m")
    assert convert.plan_conversion(folder, tmp_path / "out").arguments["forward_check"] is True
    assert convert.plan_conversion(folder, tmp_path / "out", forward_check=False).arguments["forward_check"] is False


def test_unknown_key_requires_the_forward_check(tmp_path):
    folder = tiny.hollow(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"clip_qkv": 8.0}))
    assert convert.plan_conversion(folder, tmp_path / "out").gib
    with pytest.raises(UserError, match=r"config\.json has unknown keys: clip_qkv"):
        convert.plan_conversion(folder, tmp_path / "out", forward_check=False)
