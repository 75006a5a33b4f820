import pytest

from superpod.collection import registry
from superpod.collection.facts import matching
from superpod.errors import UserError


def test_refuses_empty_search_word():
    with pytest.raises(UserError, match="is empty"):
        matching.find_recipes(["llama3_8b", ""])


def test_suggests_ids_for_misspelt_id():
    with pytest.raises(UserError) as refused:
        matching.find_recipes(["meta-lama/Llama-3.1-8B"])
    assert "meta-llama/Llama-3.1-8B" in refused.value.hint


@pytest.mark.parametrize("look_up", [registry.find, lambda name: matching.find_recipes([name])])
def test_truncates_long_unknown_name(look_up):
    with pytest.raises(UserError) as refused:
        look_up("x" * 9000)
    assert len(str(refused.value)) < 300
