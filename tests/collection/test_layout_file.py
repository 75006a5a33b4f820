import shutil
import tomllib

import pytest

from superpod.collection import layout_file, layout_text, registry
from superpod.errors import UserError
from superpod.nemo2 import planned_job
from superpod.nemo2.build import resilience
from superpod.planner import hardware, models
from superpod.planner.layout import Layout
from superpod.planner.planned_job import Options, PlannedJob


def planned(gpus=128, model="llama3_70b", precision="bf16", **layout):
    node = hardware.node("h100")
    fabric = hardware.builtin().fabric_of(node)
    return PlannedJob(models.find(model), node, fabric, gpus, 8192, precision, Layout(**{"gbs": 512, **layout}))


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(registry.LAYOUTS, tmp_path / "layouts")


def groups(path):
    return {tuple(group["recipes"]): group["nodes"] for group in tomllib.loads(path.read_text())["layouts"]}


def test_a_new_table_is_a_recipe_and_the_rest_of_the_file_stays(folder):
    path = folder / "llama3_70b.toml"
    path.write_text(
        before := '# By hand.\n[[layouts]]\nrecipes = ["pretrain_h100_bf16"]\nnodes.16 = { tp = 8, gbs = 1 }  # racks\n'
    )
    job = planned(precision="fp8cs", tp=4, pp=4, vp=5, sp=True)
    layout_file.write("llama3_70b", job, folder=folder)
    after = path.read_text()
    assert after.startswith(before.rstrip("\n"))
    sizes = groups(path)["pretrain_h100_fp8cs",]
    assert sizes["16"].pop("save_every") == layout_file.save_every(job)
    assert sizes == {"16": {"tp": 4, "pp": 4, "vp": 5, "sp": True, "gbs": 512}}
    assert Layout.from_mapping(sizes["16"], "") == Layout(tp=4, pp=4, vp=5, sp=True, gbs=512)


def test_another_size_of_a_table_becomes_its_line(folder):
    path = folder / "llama3_70b.toml"
    first = "nodes.16 = { tp = 4, pp = 4, vp = 5, sp = true, gbs = 512 }\n"
    path.write_text(before := f'# By hand.\n[[layouts]]\nrecipes = ["pretrain_h100_bf16"]\n{first}')
    job = planned(gpus=256, tp=4, pp=2, cp=1, sp=True, mbs=2)
    layout_file.write("llama3_70b", job, folder=folder)
    line = (
        f"nodes.32 = {{ tp = 4, pp = 2, sp = true, mbs = 2, gbs = 512, save_every = {layout_file.save_every(job)} }}\n"
    )
    assert path.read_text() == before + line


def test_the_line_of_a_size_is_replaced(folder):
    path = folder / "llama3_70b.toml"
    head = '# By hand.\n[[layouts]]\nrecipes = ["pretrain_h100_bf16"]\nnodes.8 = { gbs = 64 }\n'
    path.write_text(head + "nodes.16 = { tp = 8, cp = 2, gbs = 64 }\n")
    job = planned(tp=4, sp=True)
    layout_file.write("llama3_70b", job, folder=folder)
    steps = layout_file.save_every(job)
    assert path.read_text() == head + f"nodes.16 = {{ tp = 4, sp = true, gbs = 512, save_every = {steps} }}\n"


def test_a_recipe_that_another_table_lays_out_gets_its_own(folder):
    """With its other sizes: only the planned one changes, and nothing of those it shared its table with."""
    path = folder / "llama3_70b.toml"
    names = '"pretrain_h100_bf16", "pretrain_h100_fp8cs", "pretrain_h100_fp8ds"'
    path.write_text(
        f"[[layouts]]\nrecipes = [{names}]\nnodes.8 = {{ pp = 2, gbs = 512 }}\nnodes.16 = {{ gbs = 512 }}\n"
    )
    job = planned(precision="fp8cs", tp=8, sp=True)
    layout_file.write("llama3_70b", job, folder=folder)
    steps = layout_file.save_every(job)
    assert groups(path) == {
        ("pretrain_h100_bf16", "pretrain_h100_fp8ds"): {"8": {"pp": 2, "gbs": 512}, "16": {"gbs": 512}},
        ("pretrain_h100_fp8cs",): {
            "8": {"pp": 2, "gbs": 512},
            "16": {"tp": 8, "sp": True, "gbs": 512, "save_every": steps},
        },
    }


def test_what_is_written_is_what_the_registry_reads(folder):
    path = layout_file.write("llama3_70b", planned(precision="fp8cs", tp=8, sp=True), folder=folder)
    before = layout_text.read(registry.LAYOUTS / "llama3_70b.toml")
    sizes = {name: group.layouts for group in layout_text.read(path) for name in group.recipes}
    for group in before:
        for name in group.recipes:
            changed = {16: Layout(tp=8, sp=True, gbs=512)} if name == "pretrain_h100_fp8cs" else {}
            assert sizes.pop(name) == group.layouts | changed
    assert not sizes


@pytest.mark.parametrize("name", ["llama3_70b_pretrain_h100_fp8cs", "deepseek_v3_pretrain_b200_mxfp8"])
def test_the_steps_that_are_written_are_those_that_the_recipe_would_compute(tmp_path, name):
    recipe = registry.find(name)
    for nodes in recipe.nodes:
        job = planned_job.job(recipe, nodes)
        assert layout_file.save_every(job.replace(options=Options())) == resilience.planned(job)
        layout_file.write(recipe.model.name, job, folder=tmp_path)
    (group,) = layout_text.read(tmp_path / f"{recipe.model.name}.toml")
    assert group.saves == {n: resilience.planned(planned_job.job(recipe, n)) for n in recipe.nodes}


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


def test_fine_tuning_of_a_model_with_long_samples_has_no_length_in_its_name(tmp_path):
    """nemotronh_4b is trained on 8,192 tokens and tuned on 4,096, which is what `sft` means."""
    job = planned_job.job(registry.find("nemotronh_4b_sft_h100_bf16"))
    text = layout_file.write("nemotronh_4b", job, folder=tmp_path).read_text()
    assert 'recipes = ["sft_h100_bf16"]' in text
