"""`[notify]` of a profile: the options in the script, and that no address appears anywhere."""

import json
import re
import shlex

import pytest

from superpod.errors import UserError
from superpod.slurm.profiles import profiles
from superpod.slurm.profiles.profile_schema import Cluster
from superpod.slurm.script import batch_script
from superpod.slurm.submission import request_checks
from tests.slurm.script.test_batch_script import job_for

BED = (profiles.DEFAULT_PROFILES / "testbed.toml").read_text()
SECRET = "https://hooks.example.org/services/T000/B000/neverwritten"


def with_notify(*lines: str) -> Cluster:
    return profiles.parse(BED + "\n[notify]\n" + "\n".join(lines) + "\n", "bed.toml")


def test_mail_is_left_to_slurm():
    text = batch_script.render(job_for("testbed", with_notify('mail = "me@site.org"', 'mail_on = ["END", "FAIL"]')))
    assert "#SBATCH --mail-user=me@site.org\n#SBATCH --mail-type=END,FAIL\n" in text
    assert "mail" not in batch_script.render(job_for("testbed")).partition("#>>")[0]


def test_job_receives_location_of_address_only(monkeypatch):
    monkeypatch.setenv("HOOK", SECRET)
    profile = with_notify('webhook_env = "HOOK"', 'webhook_on = ["end", "stall"]')
    request_checks.refuse_webhook(profile)
    text = batch_script.render(job_for("testbed", profile))
    words = shlex.split(text[text.index('\nexec "$host_python"') : text.index("\nexit 1 #")])
    named = json.loads(words[words.index("--notify") + 1])
    assert named == {"env": "HOOK", "file": "", "on": ["end", "stall"]}
    assert "neverwritten" not in text


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f'webhook_env = "{SECRET}"', "the name of a variable"),
        (f'webhook_file = "{SECRET}"', "the path of a file"),
        (f'webhook = "{SECRET}"', "is not a key"),
        (f'webhook_on = ["{SECRET}"]', "must be one of 'end', 'stop' or 'stall'"),
        ('mail_on = ["DONE"]', "must be one of 'NONE'"),
    ],
)
def test_address_in_profile_is_refused_and_not_printed(line, says):
    with pytest.raises(UserError, match=re.escape(says)) as refused:
        with_notify(line)
    assert "neverwritten" not in str(refused.value) + refused.value.hint


def test_unreachable_webhook_is_refused_before_submission(monkeypatch, tmp_path):
    monkeypatch.delenv("HOOK", raising=False)
    with pytest.raises(UserError, match="the variable HOOK does not contain a URL"):
        request_checks.refuse_webhook(with_notify('webhook_env = "HOOK"'))
    file = tmp_path / "hook"
    file.write_text(SECRET)
    file.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600") as refused:
        request_checks.refuse_webhook(with_notify(f'webhook_file = "{file}"'))
    assert "neverwritten" not in str(refused.value)
    file.chmod(0o600)
    request_checks.refuse_webhook(with_notify(f'webhook_file = "{file}"'))
    far = profiles.parse(BED + '\n[login]\nhost = "far"\n[notify]\nwebhook_env = "HOOK"\n', "far.toml")
    with pytest.raises(UserError, match="not passed over SSH"):
        request_checks.refuse_webhook(far)
    monkeypatch.setenv("HOOK", SECRET)
    own = BED.replace("[health]", "self_submit = true\n\n[health]") + '\n[notify]\nwebhook_env = "HOOK"\n'
    with pytest.raises(UserError, match="is not passed to jobs"):
        request_checks.refuse_webhook(profiles.parse(own, "own.toml"))
