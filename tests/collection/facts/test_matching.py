import pytest

from superpod.collection import registry
from superpod.collection.facts import matching
from superpod.errors import UserError


def test_an_empty_word_is_refused_since_every_name_contains_it():
    with pytest.raises(UserError, match="a word is empty"):
        matching.matching(["llama3_8b", ""])


def test_a_hugging_face_id_with_a_slip_gets_the_closest_ids():
    with pytest.raises(UserError) as refused:
        matching.matching(["meta-lama/Llama-3.1-8B"])
    assert "meta-llama/Llama-3.1-8B" in refused.value.hint


@pytest.mark.parametrize("look_up", [registry.find, lambda name: matching.matching([name])])
def test_an_unknown_name_of_many_letters_is_cut(look_up):
    with pytest.raises(UserError) as refused:
        look_up("x" * 9000)
    assert len(str(refused.value)) < 300
