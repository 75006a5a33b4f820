"""The sockets of the page: this machine's own addresses and no other."""

from __future__ import annotations

import errno
import socket

from superpod.errors import UserError

ADDRESSES = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


def listening(port: int) -> list[socket.socket]:
    """Sockets at `port` of 127.0.0.1 and, where there is IPv6, of ::1; 0 = a port that is free.

    Raises:
        UserError: the port is out of range, somebody else's at either address, or needs more rights.
    """
    if not 0 <= port <= 65535:
        raise UserError(f"--port is {port}; it is 0 to 65535", "0, the default, takes one that is free")
    for _ in range(20):
        try:
            return _at(port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and not port:
                continue  # free at the first address, and taken at the second
            if error.errno == errno.EADDRINUSE:
                raise UserError(
                    f"port {port} is in use", "another --port, or leave it out for one that is free"
                ) from None
            if error.errno == errno.EACCES:
                raise UserError(f"port {port} is for root", "--port 1024 or above") from None
            raise
    raise UserError("no port is free at both 127.0.0.1 and ::1", "name one: --port N")


def _at(port: int) -> list[socket.socket]:
    """Both, or none: at one of two addresses somebody else could wait for those who type `localhost`."""
    made: list[socket.socket] = []
    try:
        for family, address in ADDRESSES:
            try:
                made.append(_socket(family, address, port))
            except OSError as error:
                if family == socket.AF_INET or error.errno == errno.EADDRINUSE:
                    raise
                continue  # no IPv6 here
            port = made[0].getsockname()[1]
    except OSError:
        for one in made:
            one.close()
        raise
    return made


def _socket(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of an earlier page's closed connections
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((address, port))
        made.listen(128)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made
