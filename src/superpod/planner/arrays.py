"""Types for the planner's arithmetic, which works on scalars or on numpy arrays with one entry per layout."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Column: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]

Number: TypeAlias = float | Array | Column
Integer: TypeAlias = int | Column
Boolean: TypeAlias = bool | Flags
