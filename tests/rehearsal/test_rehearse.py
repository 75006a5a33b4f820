"""What a rehearsal changes in a recipe and what it refuses; nothing else in the project patches."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from superpod.common.package_files import PACKAGE
from superpod.rehearsal import RehearsalError
from superpod.rehearsal.patches.table import update_tables
from superpod.rehearsal.training.cpu_recipe import _check_devices
from tests.conftest import ROOT
from tests.rehearsal.case_client import CaseRequest, with_outcomes
from tests.source_rules import FOLDERS


@pytest.mark.nemo
@with_outcomes(CaseRequest("changes"))
def test_changes_are_listed_and_the_recipe_is_left_alone(outcome):
    assert outcome["outcome"] == "passed", (outcome["error"], outcome["log"])
    assert outcome["value"] == [
        ["", "llm.pretrain", "superpod.rehearsal.entry.pretrain"],
        ["trainer.devices", "8", "2"],
        ["trainer.accelerator", "gpu", "cpu"],
        ["trainer.num_nodes", "4", "1"],
        ["trainer.strategy.process_group_backend", "None", "gloo"],
        ["trainer.strategy.ckpt_async_save", "True", "False"],
        ["trainer.plugins.fp8", "hybrid", "None"],
        ["trainer.plugins.fp8_param_gather", "True", "False"],
        ["data.pin_memory", "True", "False"],
        ["data.num_workers", "8", "0"],
        ["trainer.callbacks[1]", "NsysCallback", "None"],
    ]


@pytest.mark.parametrize(("devices", "hint"), [(6, "try devices=8"), (0, "try devices=4"), (1, "try devices=4")])
def test_devices_must_fit_the_layout(devices, hint):
    strategy = SimpleNamespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, context_parallel_size=None)
    with pytest.raises(RehearsalError, match=f"tp 2 x pp 2 x cp 1 = 4 processes, but devices is {devices}") as error:
        _check_devices(strategy, devices)
    assert error.value.hint == hint
    _check_devices(strategy, 8)


def test_the_page_has_the_current_table():
    page = ROOT / "docs" / "rehearsal.md"
    assert update_tables(page.read_text()) == page.read_text(), (
        "python -m superpod.rehearsal.patches.table --write docs/rehearsal.md"
    )


PATCHES = re.compile(r"torch\.(cuda|Tensor|nn\.Module)\.\w+ = |(setattr|replace)\(torch|TorchFunctionMode")


def test_only_the_rehearsal_patches_torch():
    files = [path for folder in FOLDERS for path in (PACKAGE / folder).rglob("*.py")]
    patching = {path.parent.relative_to(PACKAGE) for path in files if PATCHES.search(path.read_text())}
    assert patching == {Path("rehearsal/patches"), Path("rehearsal/te")}
