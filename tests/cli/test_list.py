"""`recipes list` for programs."""

import json

from superpod.recipes.registry import recipes


def test_list_json_is_what_the_registry_holds(recipes_cli):
    facts = json.loads(recipes_cli("list", "--json").stdout)
    assert [f["name"] for f in facts] == list(recipes())
    assert all(f["layouts"] and f["title"] for f in facts)


def test_list_filters_by_words(recipes_cli):
    assert [f["name"] for f in json.loads(recipes_cli("list", "tiny", "fp32", "--json").stdout)] == ["tiny_llama3_fp32"]
