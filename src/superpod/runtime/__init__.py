"""Code that runs in a job next to NeMo: metrics, heartbeats, the done marker, signals, logs of the ranks.

It is copied into the run folder together with diagnosis/ and a few files from common/ (`attempts/payload.py`), and uses
only the standard library, except for `RunCallback`, which needs lightning.
"""

from typing import Any

__all__ = ["RunCallback", "RunError"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from superpod.runtime.rank import callback

        return getattr(callback, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
