"""What a proof's processes report of a build: refusals, what is missing, and groups whose size was taken."""

import pytest

from superpod.errors import UserError
from superpod.rehearsal.proof import rank_models
from superpod.rehearsal.te.device import UnknownGenerationError


def raising(error):
    def work():
        raise error

    return work


def test_whatever_a_library_raises_is_the_result():
    assert rank_models._run(raising(AssertionError("no\nway"))) == {"error": "AssertionError: no way"}
    nothing = raising(ImportError("no module named nothing"))
    assert rank_models._run(nothing) == {"error": "ImportError: no module named nothing"}


def test_a_package_or_a_gpu_that_no_build_can_have_is_missing_not_wrong():
    package = raising(ImportError("mamba_ssm is not installed"))
    assert rank_models._run(package) == {"missing": "ImportError: mamba_ssm is not installed"}
    gpu = raising(UnknownGenerationError("sm89"))
    assert rank_models._run(gpu) == {"missing": "UnknownGenerationError: sm89"}
    wrong = raising(UserError("tp 3 does not divide 8"))
    assert rank_models._run(wrong) == {"error": "UserError: tp 3 does not divide 8"}


class Group:
    def __init__(self, name):
        self.group_desc = name

    def size(self):
        return 8


@pytest.fixture
def group(monkeypatch):
    """Groups of this test in place of torch's."""
    import torch.distributed as dist

    monkeypatch.setattr(dist, "ProcessGroup", Group)
    return Group


def initialize_ub(group):
    return group.size()


def micro_batches(group):
    return group.size()


@pytest.mark.nemo
def test_a_constructor_that_takes_the_size_of_data_parallelism_is_noticed(group):
    with rank_models._record_measured_groups() as measured:
        group("TENSOR_MODEL_PARALLEL_GROUP").size()
        assert initialize_ub(group("default_pg")) == 8
        assert micro_batches(group("DATA_PARALLEL_GROUP")) == 8
        assert measured == set()
        assert group("DATA_PARALLEL_GROUP_WITH_CP").size() == 8
    group("EXPERT_DATA_PARALLEL_GROUP").size()
    assert measured == {"DATA_PARALLEL_GROUP_WITH_CP"}
