"""Test names of files in a collection, and the cache key of resolved runs."""

import pytest

from superpod.common import collection
from superpod.errors import UserError
from superpod.requests import resolve
from superpod.requests.request import Request
from superpod.slurm.profiles.profile_values import CHECKS


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Return a function that writes a file of a collection."""
    monkeypatch.setenv(collection.VARIABLE, str(tmp_path))

    def write(name, text=""):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("name", ["node", CHECKS[0], "a b(c", "x;touch pwned", "a.b", "1st"])
def test_refuses_invalid_check_names(own, name):
    own(f"checks/{name}.sh", "true")
    with pytest.raises(UserError, match=r"already has this name|is not a valid name for a check"):
        collection.checks(CHECKS)
    own(f"checks/{name}.sh").unlink()
    own("checks/own-check_2.sh", "true")
    assert list(collection.checks(CHECKS)) == ["own-check_2"]


@pytest.mark.parametrize("name", ["json", "torch", "pytest", "numpy", "recipe", "two words"])
def test_refuses_module_that_shadows_another(own, name):
    own(f"modules/{name}.py")
    with pytest.raises(UserError, match="is not a valid module name"):
        collection.modules()


@pytest.mark.parametrize(
    "change",
    [
        lambda own: own("models/_shared.py", "A = 1"),
        lambda own: own("modules/package/__init__.py"),
        lambda own: own("shapes/m/config.json", "{}"),
        lambda own: own("modules/acme.py", "A = 1").rename(own("modules/b.py").parent / "c.py"),
    ],
)
def test_cache_key_covers_every_file(own, change):
    own("modules/acme.py", "A = 1")
    before = resolve._cache_key(Request("tiny_llama3"))
    assert resolve._cache_key(Request("tiny_llama3")) == before
    change(own)
    assert resolve._cache_key(Request("tiny_llama3")) != before
