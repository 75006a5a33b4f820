import pytest

from superpod.errors import UserError
from superpod.planner.layout import Layout
from superpod.recipes import registry


def write(folder, text, name="llama3_8b"):
    (folder / f"{name}.toml").write_text(text)
    model = registry.models()[name]
    return list(registry._read(model, folder / f"{name}.toml"))


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


def test_the_line_of_a_size_is_its_whole_layout_but_for_the_batch(tmp_path):
    text = "[pretrain_h100_bf16]\nnodes = [1, 2]\ncp = 2\ngbs = 8\nat.1 = { tp = 2 }\n"
    (recipe,) = write(tmp_path, text)
    assert recipe.layouts == {1: Layout(tp=2, gbs=8), 2: Layout(cp=2, gbs=8)}


def test_a_table_lays_out_the_recipes_it_names(tmp_path):
    text = '[pretrain_h100_bf16]\nalso = ["pretrain_gb200_bf16", "16k_sft_h100_fp8cs"]\nnodes = [1]\ntp = 2\ngbs = 8\n'
    found = {r.name: (r.task, r.gpu, r.seq, r.gpus_per_node, r.layout().tp) for r in write(tmp_path, text)}
    assert found == {
        "llama3_8b_pretrain_h100_bf16": ("pretrain", "h100", 8192, 8, 2),
        "llama3_8b_pretrain_gb200_bf16": ("pretrain", "gb200", 8192, 4, 2),
        "llama3_8b_16k_sft_h100_fp8cs": ("sft", "h100", 16384, 8, 2),
    }


def test_context_length_comes_from_the_name(tmp_path):
    (recipe,) = write(tmp_path, "[64k_pretrain_h100_bf16]\nnodes = [8]\ncp = 8\ngbs = 8\n")
    assert (recipe.name, recipe.seq) == ("llama3_8b_64k_pretrain_h100_bf16", 65536)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[pretrain_h100_bf16]\nnodes = [1]\ntq = 2\n", "no layout key is called 'tq'"),
        ("[pretrain_h100_bf16]\nnodes = [1]\ntp = 'two'\n", "tp takes a whole number, not 'two'"),
        ("[pretrain_h100_bf16]\nnodes = [1]\nsp = 1\n", "sp takes true or false, not 1"),
        ("[pretrain_h999_bf16]\nnodes = [1]\n", "is not [NNk_]task_gpu_precision"),
        ("[train_h100_bf16]\nnodes = [1]\n", "is not [NNk_]task_gpu_precision"),
        ("[pretrain_h100_bf16]\ntp = 2\n", "nodes is missing"),
    ],
)
def test_a_wrong_layout_file_is_named(tmp_path, text, says):
    with pytest.raises(UserError) as error:
        write(tmp_path, text)
    assert says in str(error.value)
    assert "llama3_8b.toml [" in str(error.value)


def test_unknown_recipe_names_the_closest():
    with pytest.raises(UserError, match="no recipe is called 'lama3_8b_pretrain_h100_bf16'") as error:
        registry.find("lama3_8b_pretrain_h100_bf16")
    assert "llama3_8b_pretrain_h100_bf16" in error.value.hint


def test_undeclared_size_is_refused_with_those_declared():
    with pytest.raises(UserError, match=r"laid out for 4, 8, 16, 32 nodes, not for 3"):
        registry.find("llama3_70b_pretrain_h100_bf16").layout(3)
