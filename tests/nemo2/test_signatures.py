"""Test parameters of classes whose `inspect.signature` is that of a base's `__new__`."""

import inspect

from superpod.nemo2.signatures import find_parameter, parameters


class Mixin:
    """Like NeMo's IOMixin: `__new__` accepts any arguments."""

    def __new__(cls, *args: object, **kwargs: object):
        return super().__new__(cls)


class Trainer:
    def __init__(self, devices: int = 1) -> None:
        self.devices = devices


class Mixed(Mixin, Trainer):
    """`inspect.signature` gives `(*args, **kwargs)`; of `(Trainer, Mixin)` too before Python 3.11.5."""


def test_parameters_are_those_of_init():
    assert "devices" not in inspect.signature(Mixed).parameters
    found = find_parameter(Mixed, "devices")
    assert found is not None
    assert (found.annotation, found.default) == (int, 1)
    assert parameters(Mixed) == ["devices"]
    assert find_parameter(Mixed, "nodes") is None
    assert find_parameter(find_parameter, "name") is not None
