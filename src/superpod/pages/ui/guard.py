"""Who may read the page: whoever has the address with the token, from a page of ours or from none. Pure functions.

Other users of a node reach its loopback too, and so do web pages that a browser on this machine has open. The token
keeps the first out. Against the second: a name that was rebound to 127.0.0.1 stands in `Host`, and a request that
another page makes says so in `Origin` and `Sec-Fetch-Site` (Fetch Metadata Request Headers, W3C).
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from urllib.parse import urlsplit

HOSTS = ("127.0.0.1", "localhost", "::1")
"""Names that this machine has for itself; the port may be another, that of an SSH tunnel."""
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
"""Of every answer. No cookie is set: a browser would send it to other ports of this machine, which others may hold."""


def new_token() -> str:
    """32 letters of an address, at random."""
    return secrets.token_urlsafe(TOKEN_BYTES)


def is_token(text: str, token: str) -> bool:
    """Whether the text is the token; takes as long for any text of its length."""
    return hmac.compare_digest(text.encode(errors="replace"), token.encode())


def problem(headers: Mapping[str, str]) -> str:
    """Why a request is refused whatever its token, by its headers; '' when it is not."""
    host = headers.get("Host", "")
    if _name(host) not in HOSTS:
        return f"this page is at {' or '.join(HOSTS)} only"
    origin = headers.get("Origin")
    if origin is not None and origin != f"http://{host}":
        return "another page may not ask this one"
    own = headers.get("Sec-Fetch-Site", "none") in ("same-origin", "none")
    if not own and headers.get("Sec-Fetch-Dest") != "document":  # a link to us that somebody follows
        return "another page may not ask this one"
    return ""


def _name(host: str) -> str:
    try:
        parts = urlsplit(f"//{host}")
        return (parts.hostname or "") if parts.netloc == host and parts.username is None else ""
    except ValueError:
        return ""
