"""The listening sockets of `recipes ui`."""

import socket
from contextlib import closing

import pytest

from superpod.errors import UserError
from superpod.pages.ui import sockets

HAS_IPV6 = socket.has_ipv6
try:
    with closing(socket.socket(socket.AF_INET6)) as _tried:
        _tried.bind(("::1", 0))
except OSError:
    HAS_IPV6 = False


def test_the_sockets_listen_on_loopback():
    made = sockets.open_sockets(0)
    names = [one.getsockname() for one in made]
    assert [name[0] for name in names] == (["127.0.0.1", "::1"] if HAS_IPV6 else ["127.0.0.1"])
    assert len({name[1] for name in names}) == 1
    for one in made:
        one.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_port_in_use_at_either_address_is_refused(address):
    if address == "::1" and not HAS_IPV6:
        pytest.skip("no IPv6 here")
    with closing(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)) as taken:
        taken.bind((address, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is in use"):
            sockets.open_sockets(port)
    for one in sockets.open_sockets(port):  # nothing was left open
        one.close()


@pytest.mark.parametrize("port", [-1, 65536])
def test_an_invalid_port_is_refused(port):
    with pytest.raises(UserError, match="between 0 and 65535"):
        sockets.open_sockets(port)
