"""A tiny Llama of Hugging Face's, written once."""

import shutil

import pytest

from tests.weights import tiny


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """Not to be changed."""
    return tiny.folder(tmp_path_factory.mktemp("llama") / "llama", "llama", bos_token_id=-1)


@pytest.fixture
def folder(whole, tmp_path):
    """A copy that may be."""
    return shutil.copytree(whole, tmp_path / "copy")
