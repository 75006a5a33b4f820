"""Opens the listening sockets of the page, only on loopback addresses."""

from __future__ import annotations

import errno
import socket

from superpod.errors import UserError

ADDRESSES = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


def open_sockets(port: int) -> list[socket.socket]:
    """Return sockets that listen on 127.0.0.1 and, if IPv6 is available, on ::1. Port 0 selects any free port.

    Raises:
        UserError: the port is out of range, in use on either address, or privileged.
    """
    if not 0 <= port <= 65535:
        raise UserError(f"--port must be between 0 and 65535, not {port}", "use 0, the default, for any free port")
    for _ in range(20):
        try:
            return _listen(port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and not port:
                continue  # the port was free on the first address but not on the second
            if error.errno == errno.EADDRINUSE:
                raise UserError(f"port {port} is in use", "omit --port to use a free one") from None
            if error.errno == errno.EACCES:
                raise UserError(f"port {port} is reserved for root", "use --port 1024 or above") from None
            raise
    raise UserError("no port is free on both 127.0.0.1 and ::1", "choose a port with --port N")


def _listen(port: int) -> list[socket.socket]:
    """Return sockets that listen on both addresses; otherwise, another user could serve a fake page at `localhost`."""
    opened: list[socket.socket] = []
    try:
        for family, address in ADDRESSES:
            try:
                opened.append(_open_socket(family, address, port))
            except OSError as error:
                if family == socket.AF_INET or error.errno == errno.EADDRINUSE:
                    raise
                continue  # IPv6 is not available
            port = opened[0].getsockname()[1]
    except OSError:
        for opened_socket in opened:
            opened_socket.close()
        raise
    return opened


def _open_socket(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    new_socket = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Ignore closed connections of an earlier server.
        new_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            new_socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        new_socket.bind((address, port))
        new_socket.listen(128)
        new_socket.setblocking(False)
    except OSError:
        new_socket.close()
        raise
    return new_socket
