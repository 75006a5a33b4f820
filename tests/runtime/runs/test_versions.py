"""Versions that a run may start with."""

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

from superpod.runtime.rank import cudnn
from superpod.runtime.runs import versions
from superpod.runtime.runs.versions import IGNORE, VERIFIED, Range, find_violations, refusal, requirements_of

GOOD = {"nemo_toolkit": "2.7.3", "megatron-core": "0.15.3", "transformer-engine": "2.9.0+70f5366", "cuda": "13.0"}
NEEDS = {"needs": [["transformer-engine", "2.8", "", "a learned softmax offset"], ["cuda", "12.9", "", "kernels"]]}


def test_the_proven_versions_start():
    assert refusal(GOOD, NEEDS, {}) == ""
    assert refusal(GOOD | {"megatron-core": "0.15.0rc8"}, {}, {}) == ""


@pytest.mark.parametrize(
    ("package", "version", "limits"),
    [
        ("nemo_toolkit", "2.5.0", "2.7 or later, below 2.8"),
        ("nemo_toolkit", "2.6.0rc0", "2.7 or later, below 2.8"),
        ("nemo_toolkit", "2.8.0", "2.7 or later, below 2.8"),
        ("megatron-core", "0.14.0", "0.15 or later, below 0.16"),
        ("megatron-core", "0.16.0rc0", ""),
        ("transformer-engine", "2.7.0", "2.9 or later, below 2.10"),
        ("transformer-engine", "2.12.0+abc", "2.9 or later, below 2.10"),
    ],
)
def test_other_versions_are_refused_by_their_numbers(package, version, limits):
    reason = refusal(GOOD | {package: version}, {}, {})
    assert version in reason
    assert limits in reason


def test_what_the_run_needs_is_refused_too():
    old = GOOD | {"transformer-engine": "2.7.0", "cuda": "12.8"}
    reason = refusal(old, NEEDS, {IGNORE: "1"})  # unverified versions are allowed, but the needs of the run stay
    assert "transformer-engine is 2.7.0, but must be 2.8 or later: a learned softmax offset" in reason
    assert "cuda is 12.8, but must be 12.9 or later" in reason
    assert "next: use an image" in reason
    assert refusal(old, {}, {IGNORE: "1"}) == ""


def test_a_gpu_without_transformer_engine_is_refused_and_a_rehearsal_is_not():
    bare = {"nemo_toolkit": "2.7.3", "megatron-core": "0.15.3"}
    assert "transformer-engine is missing" in refusal(bare | {"cuda": "13.0"}, {}, {})
    assert refusal(bare, NEEDS, {}) == ""


def test_a_pair_that_fails_is_refused_whatever_the_profile_says():
    assert "0.16.1" in refusal(GOOD | {"megatron-core": "0.16.1"}, {}, {IGNORE: "1"})


def test_facts_of_an_older_run_need_nothing():
    assert requirements_of({}) == requirements_of({"needs": "x"}) == requirements_of({"needs": [["cuda"]]}) == []


def test_this_environment_is_inside():
    """The pinned environment, but for Transformer Engine, which needs a GPU's machine to build."""
    assert find_violations(versions.installed_versions(), VERIFIED[:2]) == []


@pytest.mark.parametrize(
    ("text", "cuda"),
    [("cuda: Optional[str] = None", ""), ("cuda: Optional[str] = '13.0'", "13.0"), ("cuda = '12.9'", "12.9")],
)
def test_torchs_cuda_is_read_without_importing_it(tmp_path, monkeypatch, text, cuda):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('imported')")
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.9'\n{text}\nhip: Optional[str] = None\n")
    code = "from superpod.runtime.runs.versions import cuda_of_torch; print(cuda_of_torch())"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert done.stdout.strip() == cuda, done.stderr


def test_rank_0_refuses_by_the_runs_own_facts(tmp_path, monkeypatch):
    from superpod.runtime.rank import rank

    attempt = tmp_path / "attempts" / "001"
    attempt.mkdir(parents=True)
    (tmp_path / "run.json").write_text(json.dumps({"recipe": "gpt_oss_20b_sft_h100_bf16", **NEEDS}))
    monkeypatch.setattr(versions, "installed_versions", lambda more: GOOD | {"transformer-engine": "2.7.0"})
    monkeypatch.setenv(IGNORE, "1")
    with pytest.raises(SystemExit, match=r"refused: transformer-engine is 2\.7\.0, but must be 2\.8 or later"):
        rank._check_versions(attempt)
    monkeypatch.setattr(versions, "installed_versions", lambda more: GOOD)
    rank._check_versions(attempt)


def test_a_range_has_a_reason():
    assert all(isinstance(r, Range) and r.why for r in VERIFIED)


CUDNN = {"needs": [["cudnn", "9.13.1", "", "attention that keeps no scores"]]}


def test_an_older_cudnn_is_refused_where_attention_depends_on_it():
    reason = refusal(GOOD | {"cudnn": "9.13.0"}, CUDNN, {})
    assert "cudnn is 9.13.0, but must be 9.13.1 or later: attention that keeps no scores" in reason
    for fine in ("9.13.1", "9.13.1.26", "9.15.0"):
        assert refusal(GOOD | {"cudnn": fine}, CUDNN, {}) == ""
    assert refusal(GOOD, CUDNN, {}) == ""  # it was not found, and torch may find it


TRITON = {"needs": [["triton", "3.0", "3.5", "the fused permutation"]]}


@pytest.mark.parametrize(("found", "refused"), [({"triton": "3.6.0"}, True), ({"triton": "3.4.0"}, False), ({}, False)])
def test_triton_is_refused_only_if_its_version_is_known(found, refused):
    """Images may contain it under the name pytorch-triton."""
    reason = refusal(GOOD | found, TRITON, {})
    assert ("triton is 3.6.0, but must be 3.0 or later, below 3.5: the fused permutation" in reason) == refused


def test_cudnn_is_what_pip_has_or_what_the_library_says(monkeypatch):
    monkeypatch.delenv("CUDNN_HOME", raising=False)
    monkeypatch.delenv("CUDNN_PATH", raising=False)
    missing = importlib.metadata.PackageNotFoundError("nvidia-cudnn")
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: {"nvidia-cudnn-cu12": "9.10.2.21"}.get(name) or fail(missing)
    )
    assert cudnn.version() == "9.10.2.21"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: fail(missing))
    monkeypatch.setattr(
        cudnn, "output_of", lambda command, timeout_s: "91301" if command[-1] == "libcudnn.so.9" else None
    )
    assert cudnn.version() == "9.13.1"
    monkeypatch.setattr(cudnn, "output_of", lambda command, timeout_s: None)
    assert cudnn.version() is None


def test_cudnn_of_its_own_folder_comes_first(tmp_path, monkeypatch):
    """A library built here, which answers as cuDNN does."""
    folder = tmp_path / "lib"
    folder.mkdir()
    (tmp_path / "cudnn.c").write_text("unsigned long cudnnGetVersion(void) { return 8906; }")
    library = folder / cudnn.LIBRARY
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "cudnn.c"], check=True, timeout=60)
    monkeypatch.setenv("CUDNN_HOME", str(tmp_path))
    assert cudnn.version() == "8.9.6"


def fail(error):
    raise error
