"""What runs inside the job beside NeMo: metrics, heartbeat, done marker, signals, per-rank logs.

It is copied into the run folder, so it imports nothing of superpod outside this package but `errors`, and only the
standard library until `RunCallback` is used, which needs lightning.
"""

from typing import Any

__all__ = ["RunCallback", "RunError"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from superpod.runtime.rank import callback

        return getattr(callback, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
