import pytest

from superpod.collection import declarations, layout_text, registry
from superpod.errors import UserError
from superpod.planner.layout import Layout

NAME = "pretrain_h100_bf16"


def write(folder, text, name="llama3_8b"):
    (folder / f"{name}.toml").write_text(text)
    model = registry.models()[name]
    return list(registry.read(model, folder / f"{name}.toml"))


def test_a_name_is_known_as_a_recipe_without_reading_the_layouts_of_other_models(monkeypatch):
    """`recipes plan llama3_8b` took half a second to read 90 files and learn that this is no recipe."""
    everything = registry.recipes()
    read = []
    recipes_for = declarations.recipes_for
    monkeypatch.setattr(declarations, "recipes_for", lambda m: read.append(m.name) or recipes_for(m))
    assert all(map(registry.is_recipe, everything))
    del read[:]
    assert registry.is_recipe("llama31_405b_pretrain_h100_bf16")
    assert not registry.is_recipe("llama31_405b")
    assert not registry.is_recipe("llama31_405b_pretrain")
    assert set(read) == {"llama31_405b"}


def test_every_declared_size_is_legal():
    for recipe in registry.recipes().values():
        for nodes, layout in recipe.layouts.items():
            assert layout.violations(nodes * recipe.gpus_per_node) == [], (recipe.name, nodes)


def test_names_match_their_facts():
    for recipe in registry.recipes().values():
        long = "" if recipe.seq <= recipe.model.seq else f"_{recipe.seq // 1024}k"
        name = f"{recipe.model.name}{long}_{recipe.task}_{recipe.gpu}_{recipe.precision}"
        assert recipe.name == name or recipe.model.name.startswith("tiny_")


def test_llama_recipes_exist():
    expected = {"llama3_8b", "llama3_70b", "llama31_405b", "llama32_1b", "llama32_3b"}
    assert {f"{m}_pretrain_h100_bf16" for m in expected} | {"tiny_llama3"} <= set(registry.recipes())


LINE = f'{NAME} = {{ 1 = "tp=2,gbs=8,save_every=50", 2-8 = "cp=2,gbs=16,save_every=10+20+30", "16,48" = "gbs=48" }}'
LINES = f"""{NAME}.2-8 = "cp=2,gbs=16,save_every=10+20+30"
{NAME}."16,48" = "gbs=48"  # racks
{NAME}.1 = "tp=2,gbs=8,save_every=50"
"""
SECTION = f"""[{NAME}]
1 = "tp=2,gbs=8,save_every=50"
2-8 = "cp=2,gbs=16,save_every=10+20+30"
16 = "gbs=48"
48 = "gbs=48"
"""
EARLIER = f"""[[layouts]]
recipes = ["{NAME}"]
nodes.1 = {{ tp = 2, gbs = 8, save_every = 50 }}
nodes.2 = {{ cp = 2, gbs = 16, save_every = 10 }}
nodes.4 = {{ cp = 2, gbs = 16, save_every = 20 }}
nodes.8 = {{ cp = 2, gbs = 16, save_every = 30 }}
nodes.48 = {{ gbs = 48 }}
nodes.16 = {{ gbs = 48 }}
"""


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (LINE, [1, 1, 1, 1, 1, 1]),
        (LINES, [3, 1, 1, 1, 2, 2]),
        (SECTION, [2, 3, 3, 3, 4, 5]),
        (EARLIER, [3, 4, 5, 6, 8, 7]),
    ],
)
def test_all_forms_of_a_layout_file(tmp_path, text, lines):
    (recipe,) = write(tmp_path, "# Head.\n" + text)
    two, sixteen = Layout(cp=2, gbs=16), Layout(gbs=48)
    assert recipe.layouts == {1: Layout(tp=2, gbs=8), 2: two, 4: two, 8: two, 16: sixteen, 48: sixteen}
    assert recipe.nodes == (1, 2, 4, 8, 16, 48)
    assert recipe.saves == {1: 50, 2: 10, 4: 20, 8: 30}
    assert [recipe.lines[nodes] - 1 for nodes in recipe.nodes] == lines


def test_layout_has_all_fields_of_its_text(tmp_path):
    text = "pp=4,vp=2,mbs=2,gbs=64,chunks=3+6x4+5,recompute=selective,recompute_modules=mlp+layernorm"
    (recipe,) = write(tmp_path, f'{NAME}.1 = "{text}"')
    chunks = (3, 4, 4, 4, 4, 4, 4, 5)
    modules = ("mlp", "layernorm")
    layout = Layout(pp=4, vp=2, mbs=2, gbs=64, chunks=chunks, recompute="selective", recompute_modules=modules)
    assert recipe.layout() == layout
    assert layout_text.entry_lines(NAME, recipe.layouts, {}) == [f'{NAME} = {{ 1 = "{text}" }}']


def test_facts_from_a_name(tmp_path):
    names = ("pretrain_h100_bf16", "pretrain_gb200_bf16", "16k_sft_h100_fp8cs")
    text = "\n".join(f'{name} = {{ 1 = "tp=2,gbs=8" }}' for name in names)
    declared = {r.name: (r.task, r.gpu, r.seq, r.gpus_per_node, r.layout().tp) for r in write(tmp_path, text)}
    assert declared == {
        "llama3_8b_pretrain_h100_bf16": ("pretrain", "h100", 8192, 8, 2),
        "llama3_8b_pretrain_gb200_bf16": ("pretrain", "gb200", 8192, 4, 2),
        "llama3_8b_16k_sft_h100_fp8cs": ("sft", "h100", 16384, 8, 2),
    }


def test_context_length_comes_from_the_name(tmp_path):
    (recipe,) = write(tmp_path, '64k_pretrain_h100_bf16 = { 8 = "cp=8,gbs=8" }')
    assert (recipe.name, recipe.seq) == ("llama3_8b_64k_pretrain_h100_bf16", 65536)


EARLIER_HEAD = '[[layouts]]\nrecipes = ["pretrain_h100_bf16"]\n'


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (f'{NAME} = {{ 1 = "tq=2,gbs=1" }}', 1, "there is no layout key 'tq'"),
        (f'{NAME}.1 = "gbs=1"\n{NAME}.2 = "tp=two,gbs=1"', 2, "tp must be an integer, not 'two'"),
        (f'{NAME}.1 = "sp=1,gbs=1"', 1, "sp must be true or false, not 1"),
        (f'{NAME}.1 = "tp=2"', 1, "gbs is missing"),
        (f'{NAME}.1 = "gsb=64"', 1, "there is no layout key 'gsb'"),
        (f'{NAME}.1 = "gbs=1,gbs=2"', 1, "sets gbs twice"),
        (f"{NAME}.1 = 7", 1, "7 is not a layout"),
        (f'{NAME}.0 = "gbs=1"', 1, "0 is not a number of nodes"),
        (f'{NAME}.two = "gbs=1"', 1, "two is not a number of nodes"),
        (f'# Head.\n{NAME}.2-6 = "gbs=1"', 2, "2-6 is not a valid range"),
        (f'{NAME}.8-2 = "gbs=1"', 1, "8-2 is not a valid range"),
        (f'{NAME}.1-4 = "gbs=1"\n{NAME}.2 = "gbs=2"', 2, "two layouts for 2 nodes"),
        (f'{NAME}.1-4 = "gbs=1,save_every=1+2"', 1, "save_every has 2 numbers for 3 sizes"),
        (f'{NAME}.1-4 = "gbs=1,save_every=1+0+2"', 1, "save_every is 1+0+2"),
        ("pretrain_h999_bf16.1 = 'gbs=1'", 1, "must have the form [NNk_]TASK_GPU_PRECISION"),
        ("train_h100_bf16.1 = 'gbs=1'", 1, "must have the form [NNk_]TASK_GPU_PRECISION"),
        ("pretrain_a100_fp8cs.1 = 'gbs=1'", 1, "must have the form [NNk_]TASK_GPU_PRECISION"),
        ("pretrain_h100_fp32.1 = 'gbs=1'", 1, "must have the form [NNk_]TASK_GPU_PRECISION"),
        (f"{NAME} = {{}}", 1, "has no layout"),
        ("# Head.\n\ntp = 2", 3, "tp is not a recipe with layouts"),
        (f"{NAME} = {{ gpu = 'h100', 1 = 'gbs=1' }}", 1, "gpu set without task and precision"),
        (f"{NAME} = {{ gpus_per_node = 0, 1 = 'gbs=1' }}", 1, "gpus_per_node must be a positive integer, not 0"),
        (
            f"{NAME} = {{ task = 'sft', gpu = 'h100', precision = 'bf16', 1 = 'gbs=1' }}",
            *(1, "task, gpu, precision cannot be set"),
        ),
        (EARLIER_HEAD + "nodes.1 = { gbs = 1 }\nnodes.2 = { sp = 1, gbs = 1 }", 4, "sp must be true or false, not 1"),
        (EARLIER_HEAD + "nodes.1 = { gbs = 1, save_every = true }", 3, "save_every is True"),
        (EARLIER_HEAD + "tp = 2\nnodes.1 = { gbs = 1 }", 1, "tp is not a number of nodes"),
        (EARLIER_HEAD + "nodes = [1, 2]", 1, "'nodes' is missing"),
        ("[[layouts]]\nnodes.1 = { gbs = 1 }", 1, "'recipes' is missing"),
    ],
)
def test_reports_line_of_invalid_layout_file(tmp_path, text, line, says):
    with pytest.raises(UserError) as error:
        write(tmp_path, text)
    assert says in str(error.value)
    assert f"llama3_8b.toml:{line}: " in str(error.value)


@pytest.mark.parametrize("text", ["layouts = 3\n", "[layouts]\n", f"layouts = []\n{NAME}.1 = 'gbs=1'\n"])
def test_layouts_is_not_a_recipe_name(tmp_path, text):
    with pytest.raises(UserError, match=r"llama3_8b\.toml: 'layouts' is not the name of a recipe"):
        write(tmp_path, text)


def test_refuses_duplicate_recipe(tmp_path, monkeypatch):
    (tmp_path / "llama3_8b.toml").write_text(2 * (EARLIER_HEAD + "nodes.1 = { gbs = 1 }\n"))
    monkeypatch.setattr(declarations, "LAYOUTS", tmp_path)
    with pytest.raises(UserError, match=r"llama3_8b_pretrain_h100_bf16 is already declared"):
        declarations.recipes_for.__wrapped__(registry.models()["llama3_8b"])


def test_unknown_recipe_suggests_closest():
    with pytest.raises(UserError, match="there is no recipe 'lama3_8b_pretrain_h100_bf16'") as error:
        registry.find("lama3_8b_pretrain_h100_bf16")
    assert "llama3_8b_pretrain_h100_bf16" in error.value.hint


def test_refuses_undeclared_size():
    with pytest.raises(UserError, match=r"has no layout for 3 nodes"):
        registry.find("llama3_70b_pretrain_h100_bf16").layout(3)
