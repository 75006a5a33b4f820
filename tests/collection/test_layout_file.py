import shutil

import pytest

from superpod.collection import layout_file, layout_text, recipe_job, registry, save_interval
from superpod.errors import UserError
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


def test_appends_new_recipe(folder):
    path = folder / "llama3_70b.toml"
    path.write_text(before := '# By hand.\npretrain_h100_bf16 = { 16 = "tp=8,gbs=1" }  # racks\n')
    job = planned(precision="fp8cs", tp=4, pp=4, vp=5, sp=True)
    layout_file.write_layout("llama3_70b", job, folder=folder)
    text = f"tp=4,pp=4,vp=5,sp,gbs=512,save_every={layout_file.compute_save_every(job)}"
    assert path.read_text() == before + f'pretrain_h100_fp8cs = {{ 16 = "{text}" }}\n'


def test_adds_size_to_existing_line(folder):
    path = folder / "llama3_70b.toml"
    first = 'pretrain_h100_bf16.16 = "tp=4,pp=4,vp=5,sp,gbs=512,recompute=selective"\n'
    path.write_text(f'# By hand.\n{first}sft_h100_bf16.1 = "gbs=32"\n')
    job = planned(gpus=256, tp=4, pp=2, cp=1, sp=True, mbs=2)
    layout_file.write_layout("llama3_70b", job, folder=folder)
    steps = layout_file.compute_save_every(job)
    assert path.read_text() == (
        f'# By hand.\n{first}pretrain_h100_bf16.32 = "tp=4,pp=2,sp,mbs=2,gbs=512,save_every={steps}"\n'
        'sft_h100_bf16.1 = "gbs=32"\n'
    )


def test_replaces_one_size_of_a_range(folder):
    path = folder / "llama3_70b.toml"
    others = 'sft_h100_bf16 = { 1 = "gbs=32" }\n'
    path.write_text(f'# By hand.\npretrain_h100_bf16 = {{ 8-32 = "cp=2,gbs=64,save_every=5+6+7" }}  # racks\n{others}')
    job = planned(tp=4, sp=True)
    layout_file.write_layout("llama3_70b", job, folder=folder)
    text = f"tp=4,sp,gbs=512,save_every={layout_file.compute_save_every(job)}"
    assert path.read_text() == (
        "# By hand.\n# racks\n"
        f'pretrain_h100_bf16 = {{ "8,32" = "cp=2,gbs=64,save_every=5+7", 16 = "{text}" }}\n{others}'
    )


def test_inserts_new_recipe_before_sections(folder):
    path = folder / "llama3_70b.toml"
    path.write_text('# By hand.\n\n# racks\n[sft_h100_bf16]\n1="gbs=32"\n')
    layout_file.write_layout("llama3_70b", planned(tp=4, sp=True), folder=folder)
    after = path.read_text().splitlines()
    assert after[:2] == ["# By hand.", ""]
    assert after[2].startswith("pretrain_h100_bf16 = {")
    assert after[3:] == ["# racks", "[sft_h100_bf16]", '1="gbs=32"']


def test_refuses_recipe_in_a_section(folder):
    path = folder / "llama3_70b.toml"
    path.write_text(text := '[pretrain_h100_bf16]\n1 = "gbs=32"\n')
    with pytest.raises(UserError, match=r"llama3_70b\.toml:1: pretrain_h100_bf16 is a TOML table"):
        layout_file.write_layout("llama3_70b", planned(tp=4, sp=True), folder=folder)
    assert path.read_text() == text


def test_converts_earlier_form_with_comments(folder):
    path = folder / "llama3_70b.toml"
    names = '"pretrain_h100_bf16", "pretrain_h100_fp8cs", "pretrain_h100_fp8ds"'
    path.write_text(
        f"# By hand.\n\n# Large racks.\n[[layouts]]\nrecipes = [{names}]\nnodes.8 = {{ pp = 2, gbs = 512 }}  # tried\n"
        "nodes.16 = { gbs = 512, save_every = 50 }\n\n"
        '[[layouts]]\nrecipes = ["sft_h100_bf16"]\nnodes.1 = { gbs = 32, recompute_modules = ["mlp"] }\n'
    )
    job = planned(precision="fp8cs", tp=8, sp=True)
    layout_file.write_layout("llama3_70b", job, folder=folder)
    shared = '{ 8 = "pp=2,gbs=512", 16 = "gbs=512,save_every=50" }'
    changed = f'{{ 8 = "pp=2,gbs=512", 16 = "tp=8,sp,gbs=512,save_every={layout_file.compute_save_every(job)}" }}'
    assert path.read_text() == (
        "# By hand.\n\n# Large racks.\n# tried\n"
        f"pretrain_h100_bf16 = {shared}\npretrain_h100_fp8cs = {changed}\npretrain_h100_fp8ds = {shared}\n"
        'sft_h100_bf16 = { 1 = "gbs=32,recompute_modules=mlp" }\n'
    )


def test_writes_long_recipe_on_several_lines():
    long, short = Layout(tp=4, pp=4, cp=2, sp=True, gbs=512, recompute="full", recompute_layers=3), Layout(gbs=512)
    layouts = {4: long, 2: short, 1: short, 8: long, 3: short}
    lines = layout_text.format_entry("pretrain_h100_bf16", layouts, {4: 9, 8: 9})
    text = "tp=4,pp=4,cp=2,sp,gbs=512,recompute=full,recompute_layers=3,save_every=9"
    assert lines == [
        'pretrain_h100_bf16."1,2,3" = "gbs=512"',
        f'pretrain_h100_bf16.4-8 = "{text}"',
    ]
    (entry,) = layout_text.parse("\n".join(lines), "a.toml")
    assert (entry.layouts, entry.saves) == ({1: short, 2: short, 3: short, 4: long, 8: long}, {4: 9, 8: 9})


def test_registry_reads_what_was_written(folder):
    path = layout_file.write_layout("llama3_70b", planned(precision="fp8cs", tp=8, sp=True), folder=folder)
    before = layout_text.read(registry.LAYOUTS / "llama3_70b.toml")
    sizes = {entry.recipe: entry.layouts for entry in layout_text.read(path)}
    for entry in before:
        changed = {16: Layout(tp=8, sp=True, gbs=512)} if entry.recipe == "pretrain_h100_fp8cs" else {}
        assert sizes.pop(entry.recipe) == entry.layouts | changed
    assert not sizes


@pytest.mark.parametrize("name", ["llama3_70b_pretrain_h100_fp8cs", "deepseek_v3_pretrain_b200_mxfp8"])
def test_writes_the_computed_save_interval(tmp_path, name):
    recipe = registry.find(name)
    for nodes in recipe.nodes:
        job = recipe_job.job(recipe, nodes)
        assert layout_file.compute_save_every(job.replace(options=Options())) == save_interval.plan_interval(job)
        layout_file.write_layout(recipe.model.name, job, folder=tmp_path)
    (entry,) = layout_text.read(tmp_path / f"{recipe.model.name}.toml")
    assert entry.saves == {n: save_interval.plan_interval(recipe_job.job(recipe, n)) for n in recipe.nodes}


def test_merges_duplicate_lines(folder):
    job = planned(precision="fp8cs", tp=8, sp=True)
    once = layout_file.write_layout("llama3_70b", job, folder=folder).read_text()
    assert layout_file.write_layout("llama3_70b", job, folder=folder).read_text() == once


@pytest.mark.parametrize(
    ("name", "job", "says"),
    [
        ("kimi_k2", {"model": "kimi_k2"}, "has no recipes"),
        ("llama3_70b", {"gpus": 12}, "12 GPUs are not a multiple of the 8"),
        ("llama3_70b", {"precision": "fp32"}, "pretrain_h100_fp32 is not a valid recipe name"),
    ],
)
def test_refuses_invalid_recipe_without_changes(folder, name, job, says):
    before = {path.name: path.read_text() for path in folder.iterdir()}
    with pytest.raises(UserError, match=says):
        layout_file.write_layout(name, planned(**job), folder=folder)
    assert {path.name: path.read_text() for path in folder.iterdir()} == before


def test_reports_unwritable_file(tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        layout_file.write_layout("llama3_70b", planned(), folder=tmp_path / "none")


def test_default_finetuning_length_is_not_in_the_name(tmp_path):
    """nemotronh_4b is pretrained with 8,192 tokens and fine-tuned with the default of 4,096."""
    job = recipe_job.job(registry.find("nemotronh_4b_sft_h100_bf16"))
    text = layout_file.write_layout("nemotronh_4b", job, folder=tmp_path).read_text()
    assert text.startswith("sft_h100_bf16 = {")
