import pytest

from tests.extending.collection import write_collection


@pytest.fixture(scope="session")
def acme(tmp_path_factory):
    """The collection of docs/extending.md, which tests must not change."""
    return write_collection(tmp_path_factory.mktemp("collections") / "acme")


@pytest.fixture
def own(tmp_path):
    """A copy that tests may change, at a path with a space and quotes."""
    return write_collection(tmp_path / 'it\'s "my" acme')
