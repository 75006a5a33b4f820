import pytest

from superpod.planner.errors import UserError
from superpod.recipes import registry


def write(folder, text, name="llama3_8b"):
    (folder / f"{name}.toml").write_text(text)
    model = registry.models()[name]
    return list(registry._read(model, folder / f"{name}.toml"))


@pytest.mark.parametrize("recipe", registry.recipes().values(), ids=lambda r: r.name)
def test_every_declared_size_is_legal(recipe):
    for nodes, layout in recipe.layouts.items():
        assert layout.violations(nodes * recipe.gpus_per_node) == []


@pytest.mark.parametrize("recipe", registry.recipes().values(), ids=lambda r: r.name)
def test_names_say_what_contracts_say(recipe):
    if recipe.model.name.startswith("tiny_"):
        return
    assert recipe.name == f"{recipe.model.name}_{recipe.task}_{recipe.gpu}_{recipe.precision}"


def test_the_first_family_is_there():
    expected = {"llama3_8b", "llama3_70b", "llama31_405b", "llama32_1b", "llama32_3b"}
    assert {f"{m}_pretrain_h100_bf16" for m in expected} | {"tiny_llama3"} <= set(registry.recipes())


def test_one_size_may_differ_from_the_table(tmp_path):
    text = "[pretrain_h100_bf16]\nnodes = [1, 2]\ncp = 2\ngbs = 8\nat.1 = { cp = 1, tp = 2 }\n"
    (recipe,) = write(tmp_path, text)
    assert (recipe.layouts[1].cp, recipe.layouts[1].tp) == (1, 2)
    assert (recipe.layouts[2].cp, recipe.layouts[2].tp) == (2, 1)


def test_context_length_comes_from_the_name(tmp_path):
    (recipe,) = write(tmp_path, "[64k_pretrain_h100_bf16]\nnodes = [8]\ncp = 8\ngbs = 8\n")
    assert (recipe.name, recipe.seq) == ("llama3_8b_64k_pretrain_h100_bf16", 65536)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[pretrain_h100_bf16]\nnodes = [1]\ntq = 2\n", "no layout key is called 'tq'"),
        ("[pretrain_h100_bf16]\nnodes = [1]\ntp = 'two'\n", "tp takes a whole number, not 'two'"),
        ("[pretrain_h100_bf16]\nnodes = [1]\nsp = 1\n", "sp takes true or false, not 1"),
        ("[pretrain_h999_bf16]\nnodes = [1]\n", "a table is called [NNk_]task_gpu_precision"),
        ("[train_h100_bf16]\nnodes = [1]\n", "a table is called [NNk_]task_gpu_precision"),
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
    with pytest.raises(UserError, match="laid out for 16, 32, 64, 128 nodes, not for 3"):
        registry.find("llama3_70b_pretrain_h100_bf16").layout(3)
