import subprocess
import sys
import time

import pytest

from superpod.launch import doctor
from superpod.launch.doctor import run_checks, satisfies
from superpod.runtime.runs import versions

MIXED = {
    "torch": "2.13.0+cpu",
    "nemo_toolkit": "2.7.3",
    "megatron-core": "0.16.1",
    "nemo_run": "0.11.1",
    "leptonai": "0.47.1",
    "pyarrow": "21.0.0",
    "numpy": "1.26.4",
    "protobuf": "7.34.0",
}


def by_name() -> dict[str, doctor.Check]:
    return {check.name: check for check in run_checks()}


@pytest.fixture
def installed(monkeypatch):
    """Pretend that exactly these versions are installed."""

    def pretend(versions: dict[str, str]) -> None:
        monkeypatch.setattr(doctor, "version_of", versions.get)

    return pretend


@pytest.mark.parametrize(
    ("version", "rule", "kept"),
    [
        ("2.7.3", "==2.7.*", True),
        ("2.8.0", "==2.7.*", False),
        ("2.70.0", "==2.7.*", False),
        ("0.15.3", "==0.15.*", True),
        ("2.13.0+cpu", "==2.13.*", True),
        ("2.13.0a0+git1", "==2.13.*", True),
        ("1.26.4", "<2", True),
        ("2.0.0", "<2", False),
        ("22.0.0", "<22", False),
        ("21.0.0", "<22", True),
        ("0.30.0", "<0.30", False),
        ("0.30.0rc1", "<0.30", False),
        ("0.27.3", "<0.30", True),
        ("0.9", "<0.30", True),
        ("1.0", "<0.30", False),
    ],
)
def test_satisfies(version, rule, kept):
    assert satisfies(version, rule) is kept


def test_wrong_versions_are_listed_with_fix(installed):
    installed(MIXED)
    wrong = {name: check for name, check in by_name().items() if name.startswith("version of")}
    assert list(wrong) == ["version of megatron-core", "version of leptonai", "version of protobuf"]
    assert wrong["version of leptonai"].next == "pip install 'leptonai<0.30'"
    assert "0.47.1" in wrong["version of leptonai"].detail
    assert not any(check.ok for check in wrong.values())


def test_right_versions_are_one_check(installed):
    installed(MIXED | {"megatron-core": "0.15.3", "leptonai": "0.27.3", "protobuf": "5.29.6"})
    assert by_name()["versions"].ok


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        ("base", "pip install -c constraints.txt -e ."),
        ("extra nemo", "pip install -c constraints.txt -e '.[nemo]'"),
        ("extra gpu", "pip install -c constraints.txt -e '.[gpu]'"),
        ("extra dev", "pip install -c constraints.txt -e '.[dev]'"),
    ],
)
def test_missing_extra_states_its_purpose(installed, extra, line):
    installed({})
    check = by_name()[extra]
    assert not check.ok
    assert check.detail.startswith("missing: ")
    assert check.enables
    assert check.next == line


def test_pins_and_extras_agree_with_pyproject():
    import tomllib

    project = tomllib.loads((doctor.PROJECT / "pyproject.toml").read_text())["project"]
    extras = {"base": project["dependencies"], **project["optional-dependencies"]}
    for name, (packages, _) in doctor._EXTRAS.items():
        for package in packages:
            assert any(line.startswith(package) for line in extras[name]), f"{package} is not in {name}"
    for line in extras["nemo"]:
        name, _, version = line.partition("==")
        if name in doctor.KNOWN_GOOD and version:
            assert satisfies(version, doctor.KNOWN_GOOD[name]), line


def fake_command(folder, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("script", "ok", "detail"),
    [
        ("for i in 1 2; do echo 'NVIDIA H200, 143771, 570.1'; done", True, "2 x NVIDIA H200, 140 GiB, driver 570.1"),
        ("echo 'No devices were found'", False, "nvidia-smi lists none"),
        ("echo 'NVIDIA-SMI has failed' >&2; exit 9", False, "nvidia-smi lists none"),
        (None, False, "none (no nvidia-smi on PATH)"),
    ],
    ids=["two", "none", "broken driver", "no tool"],
)  # fmt: skip
def test_gpu(tmp_path, monkeypatch, script, ok, detail):
    monkeypatch.setenv("PATH", str(tmp_path))
    if script is not None:
        fake_command(tmp_path, "nvidia-smi", script)
    check = by_name()["GPU"]
    assert (check.ok, check.detail) == (ok, detail)
    assert check.enables


def test_slurm_and_torchrun_are_searched_on_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    findings = by_name()
    assert not findings["Slurm"].ok
    assert findings["Slurm"].next
    assert not findings["torchrun"].ok
    assert findings["torchrun"].next
    for name in ("sbatch", "squeue", "sacct", "scancel", "scontrol", "sinfo", "torchrun"):
        fake_command(tmp_path, name, "true")
    findings = by_name()
    assert findings["Slurm"].ok
    assert findings["torchrun"].detail == str(tmp_path / "torchrun")


def test_another_recipes_package_is_reported_as_harmless(tmp_path, monkeypatch):
    assert "package recipes" not in by_name()
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    check = by_name()["package recipes"]
    assert check.ok
    assert "harmless" in check.detail
    assert str(tmp_path) in check.detail


def test_machine_facts():
    facts = versions.machine_facts()
    assert facts["versions"]["python"] == sys.version.split()[0]
    assert facts["cores"] >= 1
    assert facts["ram_gib"] > 0.5


def git(folder, *words: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_commit_is_marked_if_files_differ(tmp_path, monkeypatch):
    monkeypatch.setattr(versions, "PROJECT", tmp_path)
    assert versions.commit() is None
    git(tmp_path, "init", "-q")
    assert versions.commit() is None
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "a")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert versions.commit() == head
    (tmp_path / "a").write_text("2")
    assert versions.commit() == head + "+changes"


def test_doctor_is_fast_and_imports_nothing_heavy():
    code = """
import sys, time
began = time.perf_counter()
from superpod.launch.doctor import run_checks
run_checks()
print(time.perf_counter() - began, [name for name in ("torch", "nemo", "numpy", "lightning") if name in sys.modules])"""
    times = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PATH": ""}
        )
        seconds, heavy = done.stdout.split(" ", 1)
        assert heavy == "[]\n"
        times.append(float(seconds))
        time.sleep(0.1)
    assert min(times) < 0.3
