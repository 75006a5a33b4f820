"""Local runs refuse the same package versions as ranks on Slurm, before NeMo is imported."""

import pytest

from superpod.errors import UserError
from superpod.launch import local
from superpod.runtime.runs import versions


def other_version(folder, package: str, version: str) -> dict[str, str]:
    """An environment that reports another version of a package; the imported modules are unchanged."""
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize(
    ("package", "version", "says"),
    [
        ("megatron-core", "0.16.0", "NeMo 2.7 passes arguments that Megatron-Core 0.16 has dropped"),
        ("nemo_toolkit", "2.8.0", "nemo_toolkit is 2.8.0, but must be 2.7 or later, below 2.8"),
        ("transformer-engine", "2.12.0", "transformer-engine is 2.12.0, but must be 2.9 or later, below 2.10"),
    ],
)
def test_local_run_refuses_the_same_versions_as_slurm(package, version, says, recipes_cli, tmp_path):
    environ = other_version(tmp_path / "fake", package, version)
    done = recipes_cli("run", "tiny_llama3", "--runs", tmp_path / "runs", env=environ)
    assert (done.returncode, says in done.stderr, "Traceback" in done.stderr) == (2, True, False)
    assert "next: `recipes doctor`" in done.stderr
    assert not (tmp_path / "runs" / "tiny_llama3").exists()


def test_missing_packages_and_needs_are_refused_on_a_gpu(monkeypatch):
    have = {"cuda": "12.8", "nemo_toolkit": "2.7.3", "megatron-core": "0.15.3", "transformer-engine": "2.9.0"}
    monkeypatch.setattr(versions, "installed_versions", lambda more: dict(have))
    local.require_versions({}, on_gpu=True)
    with pytest.raises(UserError, match="deep-ep is missing") as refused:
        local.require_versions({"needs": [("deep-ep", "1.0", "", "the flex dispatcher")]}, on_gpu=True)
    assert "recipes doctor" in refused.value.hint
    del have["transformer-engine"]
    local.require_versions({}, on_gpu=False)
    with pytest.raises(UserError, match="transformer-engine is missing"):
        local.require_versions({}, on_gpu=True)
    monkeypatch.setenv(versions.IGNORE, "1")
    local.require_versions({}, on_gpu=True)
