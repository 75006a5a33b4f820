"""Misspelt columns of a table are named; columns of the reader's own are left in peace."""

import pytest

from superpod.planner.tables import column_names

NEEDED = ["id", "model", "gpu", "tp"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *[("precison", "precision"), ("recomputed", "recompute"), ("Hiden", "hidden"), ("step_tme_s", "step_time_s")],
        *[("seq_len", "seq"), ("seqlen", "seq"), ("sequence", "seq"), ("num gpus", "gpus"), ("gpu_count", "gpus")],
        *[("micro_batch_size", "mbs"), ("global-batch-size", "gbs"), ("context_parallel_size", "cp")],
    ],
)
def test_a_column_that_is_nearly_one_that_is_read_is_named(name, meant):
    [words] = column_names.describe_misspelt([*NEEDED, name], ["step_time_s"])
    assert words.startswith(f"column {name.lower()!r} is ignored; did you mean {meant}?")


def test_where_the_column_itself_is_there_another_like_it_is_the_reader_s_own():
    assert column_names.describe_misspelt([*NEEDED, "seq", "seq_len", "gpus", "num_gpus", "model_as_printed"]) == []


PUBLISHED = (
    *("source", "case", "schedule", "rank", "allocated_gib", "reserved_gib", "unit", "outcome", "notes", "size"),
    *("zero", "tokens_per_s_per_gpu", "memory_gb_printed", "tflops_per_gpu", "step_time_s", "model_as_printed"),
    *("", "date", "host", "loss", "mfu", "name", "comment", "who", "tokens", "x" * 10_000),
)


def test_columns_of_published_tables_and_of_notes_are_left_in_peace():
    assert column_names.describe_misspelt([*NEEDED, *PUBLISHED]) == []
