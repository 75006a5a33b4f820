"""Messages of a failed command of Slurm are shown once, not once per node."""

import pytest

from superpod.errors import UserError
from superpod.slurm.submission.connection import MAX_LINES, Connection, deduplicate_lines


def test_equal_messages_of_nodes_are_shown_once():
    same = [f"slurmstepd-node{n}: error: spank_task_init_privileged failed" for n in range(1, 200)]
    assert deduplicate_lines("\n".join(["srun: error: 3 tasks", *same])).splitlines() == [
        "srun: error: 3 tasks",
        same[0],
    ]


def test_number_of_different_lines_is_limited():
    lines = [f"line {n}" for n in range(MAX_LINES + 5)]
    assert deduplicate_lines("\n".join(lines)).splitlines() == [*lines[:MAX_LINES], "(5 more lines)"]
    assert deduplicate_lines("\n".join(lines[:MAX_LINES])).splitlines() == lines[:MAX_LINES]
    assert deduplicate_lines("") == ""


def test_tool_behind_timeout_is_named():
    with pytest.raises(UserError, match="this machine: false: exit code 1"):
        Connection().run(["timeout", "5", "false"])
