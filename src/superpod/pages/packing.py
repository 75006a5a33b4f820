"""Data of a page as text in it: arrays as base64, everything as compressed JSON. `assets/core.js` reads it."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

LIMITS = ((2**8, "uint8"), (2**16, "uint16"), (2**32, "uint32"))


def column(values: NDArray[Any]) -> dict[str, str]:
    """An array in the smallest type that holds it: whole numbers from 0 on, or 32-bit floats."""
    if values.dtype.kind in "iub":
        most = int(values.max()) if len(values) else 0
        kind = next(name for limit, name in LIMITS if most < limit)
    else:
        kind = "float32"
    little = np.ascontiguousarray(values, dtype=np.dtype(kind).newbyteorder("<"))
    return {"type": kind, "base64": base64.b64encode(little.tobytes()).decode()}


def packed(data: dict[str, Any]) -> str:
    """The data as base64 of compressed JSON: letters that need no escaping in HTML."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()
