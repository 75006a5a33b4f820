import shutil
import tomllib

import pytest

from superpod.errors import UserError
from superpod.planner import hardware, models
from superpod.planner.layout import Layout
from superpod.planner.planned_job import PlannedJob
from superpod.recipes import layout_file, registry


def planned(gpus=128, model="llama3_70b", precision="bf16", **layout):
    node = hardware.node("h100")
    fabric = hardware.builtin().fabric_of(node)
    return PlannedJob(models.find(model), node, fabric, gpus, 8192, precision, Layout(**{"gbs": 512, **layout}))


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(registry.LAYOUTS, tmp_path / "layouts")


def test_a_new_table_is_a_recipe_and_the_rest_of_the_file_stays(folder):
    path = folder / "llama3_70b.toml"
    path.write_text(before := "# By hand.\n[pretrain_h100_bf16]\nnodes = [16]  # eight racks\ntp = 8\n")
    layout_file.write("llama3_70b", planned(precision="fp8cs", tp=4, pp=4, vp=5, sp=True), folder=folder)
    after = path.read_text()
    assert after.startswith(before.rstrip("\n"))
    table = tomllib.loads(after)["pretrain_h100_fp8cs"]
    assert table == {"nodes": [16], "tp": 4, "pp": 4, "vp": 5, "sp": True, "gbs": 512}
    values = {k: v for k, v in table.items() if k != "nodes"}
    assert Layout.from_mapping(values, "") == Layout(tp=4, pp=4, vp=5, sp=True, gbs=512)


def test_another_size_of_a_table_becomes_its_line(folder):
    path = folder / "llama3_70b.toml"
    path.write_text("# By hand.\n[pretrain_h100_bf16]\nnodes = [16]\ntp = 4\npp = 4\nvp = 5\nsp = true\ngbs = 512\n")
    layout_file.write("llama3_70b", planned(gpus=256, tp=4, pp=2, cp=1, sp=True, mbs=2), folder=folder)
    table = tomllib.loads(path.read_text())["pretrain_h100_bf16"]
    assert (table["nodes"], table["at"]) == ([16, 32], {"32": {"tp": 4, "pp": 2, "sp": True, "mbs": 2}})
    assert path.read_text().startswith("# By hand.")


def test_a_recipe_that_another_table_lays_out_gets_its_own(folder):
    path = folder / "llama3_70b.toml"
    path.write_text(
        '[pretrain_h100_bf16]\nalso = ["pretrain_h100_fp8cs", "pretrain_h100_fp8ds"]\nnodes = [16]\ngbs = 512\n'
    )
    layout_file.write("llama3_70b", planned(precision="fp8cs", tp=8, sp=True), folder=folder)
    tables = tomllib.loads(path.read_text())
    assert tables["pretrain_h100_bf16"]["also"] == ["pretrain_h100_fp8ds"]
    assert tables["pretrain_h100_fp8cs"] == {"nodes": [16], "tp": 8, "sp": True, "gbs": 512}


def test_what_was_written_twice_is_written_once(folder):
    job = planned(precision="fp8cs", tp=8, sp=True)
    once = layout_file.write("llama3_70b", job, folder=folder).read_text()
    assert layout_file.write("llama3_70b", job, folder=folder).read_text() == once


@pytest.mark.parametrize(
    ("name", "job", "says"),
    [
        ("kimi_k2", {"model": "kimi_k2"}, "has no recipes"),
        ("llama3_70b", {"gpus": 12}, "12 GPUs are no whole nodes of 8"),
        ("llama3_70b", {"precision": "fp32"}, "no recipe can be called pretrain_h100_fp32"),
    ],
)
def test_what_cannot_be_a_recipe_is_refused_and_nothing_changes(folder, name, job, says):
    before = {path.name: path.read_text() for path in folder.iterdir()}
    with pytest.raises(UserError, match=says):
        layout_file.write(name, planned(**job), folder=folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == before


def test_a_file_that_cannot_be_written_is_said(tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        layout_file.write("llama3_70b", planned(), folder=tmp_path / "none")
