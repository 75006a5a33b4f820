import pytest

from superpod.collection import registry
from superpod.errors import UserError
from superpod.planner.layout import Layout


def write(folder, text, name="llama3_8b"):
    (folder / f"{name}.toml").write_text(text)
    model = registry.models()[name]
    return list(registry.read(model, folder / f"{name}.toml"))


def test_every_declared_size_is_legal():
    for recipe in registry.recipes().values():
        for nodes, layout in recipe.layouts.items():
            assert layout.violations(nodes * recipe.gpus_per_node) == [], (recipe.name, nodes)


def test_names_say_what_contracts_say():
    for recipe in registry.recipes().values():
        long = "" if recipe.seq <= recipe.model.seq else f"_{recipe.seq // 1024}k"
        name = f"{recipe.model.name}{long}_{recipe.task}_{recipe.gpu}_{recipe.precision}"
        assert recipe.name == name or recipe.model.name.startswith("tiny_")


def test_the_first_family_is_there():
    expected = {"llama3_8b", "llama3_70b", "llama31_405b", "llama32_1b", "llama32_3b"}
    assert {f"{m}_pretrain_h100_bf16" for m in expected} | {"tiny_llama3"} <= set(registry.recipes())


def test_the_line_of_a_size_is_its_whole_layout(tmp_path):
    (recipe,) = write(tmp_path, HEAD + "nodes.1 = { tp = 2, gbs = 8 }\nnodes.2 = { cp = 2, gbs = 16 }\n")
    assert recipe.layouts == {1: Layout(tp=2, gbs=8), 2: Layout(cp=2, gbs=16)}


def test_sizes_are_in_order_whatever_the_file_says(tmp_path):
    (recipe,) = write(tmp_path, HEAD + "nodes.16 = { gbs = 8 }\nnodes.2 = { cp = 2, gbs = 8 }\n")
    assert (recipe.nodes, recipe.layout()) == ((2, 16), Layout(cp=2, gbs=8))


def test_a_table_lays_out_the_recipes_it_names(tmp_path):
    names = '"pretrain_h100_bf16", "pretrain_gb200_bf16", "16k_sft_h100_fp8cs"'
    text = f"[[layouts]]\nrecipes = [{names}]\nnodes.1 = {{ tp = 2, gbs = 8 }}\n"
    declared = {r.name: (r.task, r.gpu, r.seq, r.gpus_per_node, r.layout().tp) for r in write(tmp_path, text)}
    assert declared == {
        "llama3_8b_pretrain_h100_bf16": ("pretrain", "h100", 8192, 8, 2),
        "llama3_8b_pretrain_gb200_bf16": ("pretrain", "gb200", 8192, 4, 2),
        "llama3_8b_16k_sft_h100_fp8cs": ("sft", "h100", 16384, 8, 2),
    }


def test_context_length_comes_from_the_name(tmp_path):
    text = '[[layouts]]\nrecipes = ["64k_pretrain_h100_bf16"]\nnodes.8 = { cp = 8, gbs = 8 }\n'
    (recipe,) = write(tmp_path, text)
    assert (recipe.name, recipe.seq) == ("llama3_8b_64k_pretrain_h100_bf16", 65536)


HEAD = '[[layouts]]\nrecipes = ["pretrain_h100_bf16"]\n'
NAMED = "[[layouts]]\nrecipes = ['{}']\nnodes.1 = {{ gbs = 1 }}\n"


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        (HEAD + "nodes.1 = { tq = 2, gbs = 1 }\n", 3, "no layout key is called 'tq'"),
        (HEAD + "nodes.1 = { tp = 'two', gbs = 1 }\n", 3, "tp takes a whole number, not 'two'"),
        (HEAD + "nodes.1 = { gbs = 1 }\nnodes.2 = { sp = 1, gbs = 1 }\n", 4, "sp takes true or false, not 1"),
        (HEAD + "nodes.1 = { tp = 2 }\n", 3, "gbs is missing"),
        (HEAD + "nodes.1 = { gsb = 64 }\n", 3, "no layout key is called 'gsb'"),
        (HEAD + "nodes.0 = { gbs = 1 }\n", 1, "nodes.0 is no number of nodes"),
        (HEAD + "nodes.two = { gbs = 1 }\n", 1, "nodes.two is no number of nodes"),
        (NAMED.format("pretrain_h999_bf16"), 1, "is not [NNk_]task_gpu_precision"),
        (NAMED.format("train_h100_bf16"), 1, "is not [NNk_]task_gpu_precision"),
        (NAMED.format("pretrain_a100_fp8cs"), 1, "is not [NNk_]task_gpu_precision"),
        (NAMED.format("pretrain_h100_fp32"), 1, "is not [NNk_]task_gpu_precision"),
        ("# First.\n\n" + HEAD + "tp = 2\n", 3, "no key is called 'tp'"),
        (HEAD, 1, "nodes is missing"),
        (HEAD + "nodes = [1, 2]\n", 1, "nodes is missing"),
        ("[[layouts]]\nnodes.1 = { gbs = 1 }\n", 1, "recipes is missing"),
        (HEAD + "gpu = 'h100'\nnodes.1 = { gbs = 1 }\n", 1, "gpu without the rest"),
        (HEAD + "gpus_per_node = 0\nnodes.1 = { gbs = 1 }\n", 1, "gpus_per_node takes a number of GPUs, not 0"),
        (
            HEAD + "task = 'sft'\ngpu = 'h100'\nprecision = 'bf16'\nnodes.1 = { gbs = 1 }\n",
            *(1, "task, gpu, precision follow from the recipe's name"),
        ),
    ],
)
def test_a_wrong_layout_file_is_named_with_its_line(tmp_path, text, line, says):
    with pytest.raises(UserError) as error:
        write(tmp_path, text)
    assert says in str(error.value)
    assert f"llama3_8b.toml:{line}: " in str(error.value)


@pytest.mark.parametrize("text", ["[pretrain_h100_bf16]\ntp = 2\n", "layouts = 3\n", "[layouts]\n", "gbs = 2\n"])
def test_another_form_of_file_is_refused(tmp_path, text):
    with pytest.raises(UserError, match=r"llama3_8b\.toml: .* is no table of a layout file") as error:
        write(tmp_path, text)
    assert "[[layouts]]" in error.value.hint


def test_a_recipe_is_laid_out_once(tmp_path, monkeypatch):
    (tmp_path / "llama3_8b.toml").write_text(2 * (HEAD + "nodes.1 = { gbs = 1 }\n"))
    monkeypatch.setattr(registry, "LAYOUTS", tmp_path)
    with pytest.raises(UserError, match=r"llama3_8b_pretrain_h100_bf16 is laid out already"):
        registry._of.__wrapped__(registry.models()["llama3_8b"])


def test_unknown_recipe_names_the_closest():
    with pytest.raises(UserError, match="no recipe is called 'lama3_8b_pretrain_h100_bf16'") as error:
        registry.find("lama3_8b_pretrain_h100_bf16")
    assert "llama3_8b_pretrain_h100_bf16" in error.value.hint


def test_undeclared_size_is_refused_with_those_declared():
    with pytest.raises(UserError, match=r"laid out for 4, 8, 16, 32 nodes, not for 3"):
        registry.find("llama3_70b_pretrain_h100_bf16").layout(3)
