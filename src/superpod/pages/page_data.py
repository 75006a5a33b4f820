"""Encode the data of a page as compressed JSON, with arrays in base64; `assets/core.js` decodes it."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

LIMITS = ((2**8, "uint8"), (2**16, "uint16"), (2**32, "uint32"))
"""(exclusive upper limit, type) of unsigned integers."""


def pack_array(values: NDArray[Any]) -> dict[str, str]:
    """Encode an array in base64: non-negative integers in the smallest unsigned type, others as 32-bit floats."""
    if values.dtype.kind in "iub":
        largest_value = int(values.max()) if len(values) else 0
        kind = next(name for limit, name in LIMITS if largest_value < limit)
    else:
        kind = "float32"
    little_endian = np.ascontiguousarray(values, dtype=np.dtype(kind).newbyteorder("<"))
    return {"type": kind, "base64": base64.b64encode(little_endian.tobytes()).decode()}


def pack(data: dict[str, Any]) -> str:
    """Encode the data of a page as compressed JSON in base64, which needs no escaping in HTML."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()
