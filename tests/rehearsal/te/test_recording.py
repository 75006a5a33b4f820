"""Digests of layers are the same in every process."""

import pytest

from superpod.rehearsal.te import recording


class Stream:
    """An object that prints its address, as a stream of context parallelism does."""


class Group:
    """A process group of 4 ranks."""

    def size(self) -> int:
        return 4

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("argument", "word"),
    [
        (Stream(), "Stream"),
        (Group(), "group of 4"),
        ([Group(), Group()], "['group of 4', 'group of 4']"),
        ({"stream": Stream()}, "[('stream', 'Stream')]"),
        ((4096, 0), "(4096, 0)"),
        (None, "None"),
    ],
)
def test_an_argument_is_named_by_what_it_means(argument, word):
    assert recording._to_text(argument) == word
