"""Access control of the page: requests need the token and must not come from another web page.

Other users of a node can reach its loopback address, and so can web pages in a browser on this machine. The token keeps
other users out. Requests from other pages are recognized by their headers: in a DNS rebinding attack, `Host` contains
the name of the attacker, and `Origin` and `Sec-Fetch-Site` identify the requesting page (Fetch Metadata, W3C).
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from urllib.parse import urlsplit

HOSTS = ("127.0.0.1", "localhost", "::1")
"""Accepted host names; any port is accepted, because SSH tunnels may use another one."""
TOKEN_BYTES = 24
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; frame-src 'self'; frame-ancestors 'self'; base-uri 'none'; form-action 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every response. No cookie is set: browsers also send cookies to other ports, where others may listen."""


def new_token() -> str:
    """Return a random token of 32 characters."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def is_token(text: str, token: str) -> bool:
    """Return whether `text` is the token, with a constant-time comparison."""
    return hmac.compare_digest(text.encode(errors="replace"), token.encode())


def find_problem(headers: Mapping[str, str]) -> str:
    """Return the reason for rejecting a request with these headers; "" if it is accepted."""
    host = headers.get("Host", "")
    if _host_name(host) not in HOSTS:
        return f"this page is available only at {' or '.join(HOSTS)}"
    origin = headers.get("Origin")
    if origin is not None and origin != f"http://{host}":
        return "requests from other pages are rejected"
    is_own = headers.get("Sec-Fetch-Site", "none") in ("same-origin", "none")
    is_link = headers.get("Sec-Fetch-Dest") == "document"  # a user may follow a link from another page
    if not is_own and not is_link:
        return "requests from other pages are rejected"
    return ""


def _host_name(host: str) -> str:
    """Return the host name in a `Host` header; "" if the header is malformed."""
    try:
        parts = urlsplit(f"//{host}")
        if parts.netloc != host or parts.username is not None:
            return ""
        return parts.hostname or ""
    except ValueError:
        return ""
