"""Five random faults with a fixed seed; `make soak` does twenty, with real NeMo."""

from tests.slurm.testbed.soak import soak


def test_five_random_faults(testbed, tmp_path):
    soak(testbed, 5, 7, tmp_path)
