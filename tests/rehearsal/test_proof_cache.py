"""The file of a proof, and what its keys depend on."""

import json

import pytest

from superpod.errors import UserError
from superpod.rehearsal import fingerprint
from superpod.rehearsal.proof_cache import KEPT, ProofCache


def test_results_come_back_and_only_for_this_code(tmp_path, monkeypatch):
    cache = ProofCache(tmp_path / "proof.json")
    cache.resolved["a"] = {"digest": "d"}
    cache.built["d"] = {"parameters": [[1]]}
    cache.save()
    assert ProofCache(tmp_path / "proof.json").resolved == {"a": {"digest": "d"}}
    monkeypatch.setattr(fingerprint, "of_resolving", lambda: "other")
    later = ProofCache(tmp_path / "proof.json")
    assert (later.resolved, later.built) == ({}, {"d": {"parameters": [[1]]}})
    monkeypatch.setattr(fingerprint, "of_building", lambda: "other")
    assert ProofCache(tmp_path / "proof.json").built == {}


def test_a_few_generations_of_code_are_kept(tmp_path, monkeypatch):
    for number in range(KEPT + 2):
        monkeypatch.setattr(fingerprint, "of_resolving", lambda number=number: str(number))
        cache = ProofCache(tmp_path / "proof.json")
        cache.resolved["a"] = {"digest": str(number)}
        cache.save()
    kept = json.loads((tmp_path / "proof.json").read_text())["resolved"]
    assert list(kept) == [str(number) for number in range(2, KEPT + 2)]


@pytest.mark.parametrize("text", ["{half", "[]", '{"key": {"parameters": [[1]]}}', '{"resolved": 1, "built": {}}'])
def test_a_file_that_cannot_be_read_is_no_file(tmp_path, text):
    (tmp_path / "proof.json").write_text(text)
    cache = ProofCache(tmp_path / "proof.json")
    assert (cache.resolved, cache.built) == ({}, {})


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    cache = ProofCache(tmp_path / "proof.json")
    cache.save()
    before = (tmp_path / "proof.json").read_text()
    cache.resolved["a"] = {"digest": "d"}
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        cache.save()
    assert (tmp_path / "proof.json").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["proof.json"]


def content(path, text):
    path.write_text(text)
    fingerprint._content.cache_clear()
    return fingerprint._content(path)


def test_comments_and_docstrings_change_no_model_and_code_does(tmp_path):
    path = tmp_path / "code.py"
    plain = content(path, "def f():\n    return 1\n")
    assert content(path, '"""Text."""\n\n\ndef f():\n    """More."""\n    return 1  # why\n') == plain
    assert content(path, "def f():\n    return 2\n") != plain
    assert content(path, 'def f():\n    return "text"\n') != plain
    data = tmp_path / "data.toml"
    assert content(data, "a = 1") != content(data, "a = 1 # why")


def test_the_key_of_a_build_has_all_that_builds():
    names = {path.relative_to(fingerprint.ROOT).as_posix() for path in fingerprint.imported(fingerprint.BUILDS)}
    assert {"rehearsal/rank_models.py", "rehearsal/resolved.py", "rehearsal/meta_build.py"} <= names
    of_te = {path.relative_to(fingerprint.ROOT).as_posix() for path in fingerprint.ROOT.glob("rehearsal/te/*.py")}
    needed = {"rehearsal/te/build.py", "rehearsal/te/entry.py", "rehearsal/te/extension.py", "rehearsal/te/device.py"}
    assert needed <= of_te & names
    assert "rehearsal/patches/registry.py" in names
    assert "planner/rules.py" not in names  # a layout's rules change no model: a layout is in what it resolves to
    assert not any(name.startswith(("rehearsal/trial", "rehearsal/table", "cli/")) for name in names)


def test_the_key_of_a_resolution_has_every_file_that_a_recipe_is_made_from(monkeypatch):
    seen = {}
    monkeypatch.setattr(fingerprint, "_hash", lambda paths, others: seen.update(paths=set(paths)) or "")
    fingerprint.of_resolving.__wrapped__()
    root = fingerprint.ROOT
    for pattern in ("recipes/**/*.py", "planner/**/*.py", "planner/data/**/*.toml", "src/superpod/*.py"):
        assert set(root.glob(pattern)) <= seen["paths"], pattern
    assert root / "rehearsal/resolved.py" in seen["paths"]
    assert not any("layouts" in path.parts and path.suffix == ".toml" for path in seen["paths"])


def test_a_proof_without_nemo_or_transformer_engine_is_refused(monkeypatch, tmp_path):
    def absent(name):
        raise fingerprint.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(fingerprint.importlib.metadata, "version", absent)
    with pytest.raises(UserError, match="nemo_toolkit is not installed"):
        fingerprint.versions.__wrapped__()
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    with pytest.raises(UserError, match="Transformer Engine"):
        fingerprint.versions.__wrapped__()


def test_the_key_of_a_build_has_the_patches_that_are_imported_by_a_name_put_together():
    patches = {
        path for path in fingerprint.ROOT.glob("rehearsal/patches/*.py") if path.stem not in ("__init__", "table")
    }
    assert {fingerprint.ROOT / "rehearsal" / "patches" / "torch_cuda.py"} <= patches
    assert patches <= fingerprint.imported(fingerprint.BUILDS)
