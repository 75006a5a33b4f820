"""Cluster profiles: the default ones, and the messages about mistakes."""

import pytest

from superpod.errors import UserError
from superpod.planner import hardware
from superpod.slurm.profiles import profile_values, profiles

GOOD = (profiles.DEFAULT_PROFILES / "testbed.toml").read_text()


def refused(text: str) -> str:
    with pytest.raises(UserError) as error:
        profiles.parse(text, "my.toml")
    return str(error.value)


@pytest.mark.parametrize("name", profiles.names())
def test_default_profiles_are_complete_and_agree_with_the_planner(name):
    profile = profiles.load(name)
    node = hardware.builtin().node(profile.gpu)
    assert profile.gpus_per_node == node.gpus
    assert profile.fabric == hardware.builtin().fabric_of(node).name
    assert profile.name == name


def test_there_is_a_profile_for_each_superpod():
    assert {"dgx_a100", "dgx_h100", "dgx_h200", "dgx_b200", "dgx_gb200", "testbed"} <= set(profiles.names())
    assert profiles.load("dgx_gb200").gpus_per_node == 4


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('gpu = "h100"', 'gpu = "h10"', "my.toml:4: gpu must be one of a100, a100_40gb, h100"),
        ('time = "10:00"', 'time = "soon"', "my.toml:15: slurm.time must be a time"),
        ('mem = "8000"', 'mpii = "none"', "my.toml:14: slurm.mpii is not a key; did you mean mpi?"),
        (
            'mem = "8000"',
            'mpi = "openmpi"',
            "slurm.mpi must be one of 'none', 'pmi2', 'pmix' or 'cray_shasta', not 'openmpi'",
        ),
        ('mem = "8000"', 'mem = "all"', "slurm.mem must be a size"),
        ("exclusive = false", "exclusive = 1", "my.toml:13: slurm.exclusive must be true or false, not 1"),
        ('account = "acct"', "account = 7", "my.toml:10: slurm.account must be a string, not 7"),
        ('account = "acct"', 'account = "a\\nb"', "slurm.account must be printable and on one line"),
        ("attempts = 3", "attempts = 0", "chain.attempts must be at least 1, not 0"),
        ("attempts = 3", "links = 3", "my.toml:25: chain.links was renamed attempts"),
        ("attempts = 3", "idle_links = 3", "my.toml:25: chain.idle_links was renamed idle_attempts"),
        ("save_s = 20", "save_s = 9000", "chain.save_s must be at most 7200, not 9000"),
        ("save_s = 20", "save_s = 400", "slurm.time 10:00 must be at least 2 x chain.save_s (400 s)"),
        ('runs = "/tmp/superpod-testbed/runs"', 'runs = "runs"', "folders.runs must be an absolute path, not 'runs'"),
        ('runs = "/tmp/superpod-testbed/runs"', "", "folders.runs is missing"),
        ("gpus_per_node = 8", 'gpus_per_node = "8"', "my.toml:6: gpus_per_node must be an integer, not '8'"),
        ("[chain]", '[env]\nHF_TOKEN = "hf_x"\n[chain]', "must not contain the secret HF_TOKEN"),
        ("[chain]", '[env]\n"A B" = "1"\n[chain]', "which is not a valid variable name"),
        ("[chain]", '[container]\nmounts = ["/a"]\n[chain]', "container.mounts must contain mounts"),
        ("[chain]", '[container]\nmounts = ["/a:b:/c"]\n[chain]', "without commas or colons"),
        ('checks = ["disk"', 'checks = ["disks"', "health.checks must be one of gpus, nvlink"),
        ("[health]", "[login]\nport = 0\n[health]", "login.port must be at least 1, not 0"),
        ("[chain]", "[chains]", "my.toml:24: chains is not a key; did you mean chain or container?"),
    ],
)
def test_mistake_is_reported_with_line_and_allowed_values(old, new, says):
    assert GOOD.count(old) >= 1
    assert says in refused(GOOD.replace(old, new, 1))


SECRET = "hf_abcdefghijklmnop"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[chain]", f'[env]\nHF_TOKEN = "{SECRET}"\n[chain]'),
        ("[chain]", f'[env]\nNAME = "{SECRET}"\n[chain]'),
        ("[chain]", f'[env]\n"A B" = "1"\nMY_TOKEN = "{SECRET}"\n[chain]'),
        ("[chain]", f'[env]\nMY_TOKEN = ["{SECRET}"]\n[chain]'),
        ("declared_only = true", f'env = "HF_TOKEN={SECRET}"'),
        ("declared_only = true", f'login = "HF_TOKEN={SECRET}"'),
        ("exclusive = false", f'options = ["--export=HF_TOKEN={SECRET}"]'),
        ("exclusive = false", f'options = ["HF_TOKEN={SECRET}"]'),
        ("exclusive = false", f'mpi = "{SECRET}"'),
        ("exclusive = false", f"HF_TOKEN = {SECRET}"),
        ("[chain]", f'[container]\nimage = "docker://me:{SECRET}@nvcr.io#x"\n[chain]'),
        ("[chain]", f'[container]\nmounts = ["{SECRET}"]\n[chain]'),
        ("[chain]", f'[software]\nmodules = ["{SECRET}"]\n[chain]'),
    ],
)
def test_a_refused_secret_is_never_printed(old, new):
    assert old in GOOD
    assert SECRET not in refused(GOOD.replace(old, new, 1))


def test_numeric_token_is_not_printed():
    message = refused(GOOD.replace("[chain]", "[env]\nHF_TOKEN = 987654321\n[chain]"))
    assert "env.HF_TOKEN must be a string" in message
    assert "987654321" not in message


def test_all_mistakes_are_reported_together():
    message = refused(GOOD.replace('mem = "8000"', 'mem = "x"').replace("attempts = 3", "attempts = 0"))
    assert len(message.splitlines()) == 2


def test_invalid_toml_is_refused_with_line():
    assert "my.toml is not valid TOML" in refused("gpu = \n")


def test_unknown_profile_suggests_a_similar_name():
    with pytest.raises(UserError) as error:
        profiles.load("dgx_h10")
    assert "dgx_h100" in error.value.hint


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("10:00", 600), ("4:00:00", 14400), ("1-12", 129600), ("1-12:30", 131400), ("2-0:0:5", 172805)],
)
def test_time_formats_of_slurm(text, seconds):
    assert profile_values.seconds(text) == seconds
