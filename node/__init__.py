"""What runs inside the job beside NeMo: metrics, heartbeat, done marker, signals, per-rank logs.

Copied into the run folder as it is, so it imports nothing of superpod outside this package, and nothing but the
standard library until `RunCallback` is asked for, which needs lightning.
"""

from typing import Any

__all__ = ["RunCallback", "RunError"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import callback

        return getattr(callback, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
