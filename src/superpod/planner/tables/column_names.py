"""Detect misspelt column names in a table, which would otherwise be ignored without a message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from superpod.planner.tables.published import COLUMNS

MIN_SIMILARITY = 0.75
"""Minimum similarity (difflib) of a misspelling to a known name; that of `seqlen` and `seq` is 0.67."""
OTHER_NAMES = {
    **{"seq_length": "seq", "sequence_length": "seq", "sequence": "seq", "seqlen": "seq", "gpu_count": "gpus"},
    **{"global_batch_size": "gbs", "micro_batch_size": "mbs", "global_batch": "gbs", "micro_batch": "mbs"},
    **{"tensor_parallel": "tp", "pipeline_parallel": "pp", "context_parallel": "cp", "expert_parallel": "ep"},
    **{"virtual_pipeline": "vp", "data_parallel": "dp", "dtype": "precision", "recomputation": "recompute"},
}
"""Name in other tools -> column."""


def describe_misspelt(names: Iterable[str], others: Iterable[str] = ()) -> list[str]:
    """Return a message for each unknown column of a table whose name is similar to a known, absent column.

    Args:
        names: the columns of the table.
        others: known columns in addition to `published.COLUMNS`.
    """
    given_names = [name.strip().lower() for name in names]
    missing = [name for name in (*COLUMNS, *others) if name not in given_names]
    unread_names = [name for name in given_names if name and name not in COLUMNS and name not in set(others)]
    return [
        f"column {name!r} is ignored; did you mean {near}? docs/planner.md lists the columns"
        for name in dict.fromkeys(unread_names)
        if (near := _find_similar(name, missing))
    ]


def _find_similar(name: str, missing: list[str]) -> str:
    """Return the column in `missing` that `name` probably means, or ""."""
    joined_name = name[:60].replace(" ", "_").replace("-", "_")
    if (other := OTHER_NAMES.get(joined_name, OTHER_NAMES.get(joined_name.removesuffix("_size"), ""))) in missing:
        return other
    words = [word for word in joined_name.split("_") if word in missing]
    if len(words) == 1 and "_" in joined_name:
        return words[0]
    return next(iter(difflib.get_close_matches(joined_name, missing, 1, MIN_SIMILARITY)), "")
