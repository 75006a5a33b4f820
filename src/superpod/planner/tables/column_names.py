"""Columns of a table that nothing reads and that look like one that is read: a typing error costs no figure unseen."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from superpod.planner.tables.published import COLUMNS

NEAR = 0.75
"""Likeness, as difflib has it, from which a name is taken for another one misspelt: `seqlen` for `seq` is 0.67."""
OTHER_NAMES = {
    **{"seq_length": "seq", "sequence_length": "seq", "sequence": "seq", "seqlen": "seq", "gpu_count": "gpus"},
    **{"global_batch_size": "gbs", "micro_batch_size": "mbs", "global_batch": "gbs", "micro_batch": "mbs"},
    **{"tensor_parallel": "tp", "pipeline_parallel": "pp", "context_parallel": "cp", "expert_parallel": "ep"},
    **{"virtual_pipeline": "vp", "data_parallel": "dp", "dtype": "precision", "recomputation": "recompute"},
}
"""What other tools call these columns."""


def misspelt(names: Iterable[str], others: Iterable[str] = ()) -> list[str]:
    """A sentence for each of a table's columns that is not read and is like one that is, which the table has not.

    Args:
        names: the table's columns.
        others: columns that are read beside those of `published`.
    """
    given = [name.strip().lower() for name in names]
    missing = [name for name in (*COLUMNS, *others) if name not in given]
    unread = [name for name in given if name and name not in COLUMNS and name not in set(others)]
    return [
        f"column {name!r} is not read; did you mean {near}? The columns are those of docs/planner.md"
        for name in dict.fromkeys(unread)
        if (near := _near(name, missing))
    ]


def _near(name: str, missing: list[str]) -> str:
    """The missing column that a name means; '' = none."""
    joined = name[:60].replace(" ", "_").replace("-", "_")
    if (other := OTHER_NAMES.get(joined, OTHER_NAMES.get(joined.removesuffix("_size"), ""))) in missing:
        return other
    words = [word for word in joined.split("_") if word in missing]
    close = words if len(words) == 1 and "_" in joined else difflib.get_close_matches(joined, missing, 1, NEAR)
    return close[0] if close else ""
