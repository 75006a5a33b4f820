"""Test parsing of --data: colons, spaces, globs and weights."""

import pytest

from superpod.data.readers import sources
from superpod.errors import UserError
from superpod.weights.finetuning import packed_data
from superpod.weights.finetuning.packed_data import DataOptions


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b c.jsonl", "d:2.jsonl", "e.jsonl:0.5", "[f].jsonl"):
        (tmp_path / name).write_text("".join(f'{{"text": "{name} {at}"}}\n' for at in range(2)))
    return tmp_path


@pytest.mark.parametrize(
    ("texts", "names", "weights"),
    [
        (["a.jsonl"], ["a.jsonl"], ()),
        (["a.jsonl:0.7", "b c.jsonl:.3"], ["a.jsonl", "b c.jsonl"], (0.7, 0.3)),
        (["d:2.jsonl"], ["d:2.jsonl"], ()),
        (["d:2.jsonl:7"], ["d:2.jsonl"], (7.0,)),
        (["e.jsonl:0.5"], ["e.jsonl:0.5"], ()),
        (["e.jsonl:0.5:1e-1"], ["e.jsonl:0.5"], (0.1,)),
        (["*.jsonl:3", "./a.jsonl:1"], ["*.jsonl", "a.jsonl"], (3.0, 1.0)),
    ],
)
def test_weight_follows_the_last_colon(texts, names, weights, folder):
    assert sources.parse_data_options(texts) == (tuple(str(folder / name) for name in names), weights)


def test_globs_and_files_with_brackets(folder):
    [both, brackets] = sources.find_sources([str(folder / "[ab]*.jsonl"), str(folder / "[f].jsonl")])
    assert [file.name for file in both.files] == ["a.jsonl", "b c.jsonl"]
    assert [file.name for file in brackets.files] == ["[f].jsonl"]


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ([""], "--data is empty"),
        (["a.jsonl:0"], "must be positive and finite"),
        (["a.jsonl:-1"], "must be positive and finite"),
        (["a.jsonl:nan"], "must be positive and finite"),
        (["a.jsonl:1e999"], "must be positive and finite"),
        (["a.jsonl:"], "is not a file, and '' is not a weight"),
        (["a.jsonl:half"], "is not a file, and 'half' is not a weight"),
        (["a.jsonl:1", "b c.jsonl"], "b c.jsonl has no weight, but others do"),
        (["a.jsonl", "./a.jsonl"], "is given twice"),
        (["a" * 5000], "File name too long"),
        (["a\0b"], "is not a path"),
        (["gone.jsonl"], "gone.jsonl is not a file"),
        (["gone.jsonl:0.5"], "gone.jsonl is not a file"),
        (["gone*.jsonl"], "matches no file"),
        (["a.jsonl/b"], "is not a file"),
        (["a.jsonl:1", "b c.jsonl:1e-9"], "an epoch that contains every sample has"),
    ],
)
def test_refuses_sources_without_samples(texts, says, folder):
    def check():
        names, weights = sources.parse_data_options(texts)
        packed_data.check_data(DataOptions(names, weights=weights))

    with pytest.raises(UserError, match=says):
        check()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"share": 0.0}, "between 0 and 1, not 0.0"),
        ({"share": float("nan")}, "between 0 and 1, not nan"),
        ({"long": "no"}, "--long no is not one of"),
        ({"learn": "no"}, "--learn no is not one of"),
        ({"template": "gone.jinja"}, "--chat-template gone.jinja is not a file"),
        ({"template": "a.jsonl"}, "does not use `messages`"),
        ({"template": "."}, "is not a file"),
        ({"validation_data": ("a.jsonl",)}, r"every sample of .*a.jsonl is also in --validation-data .*a.jsonl"),
    ],
)
def test_refuses_invalid_options(changes, says, folder):
    with pytest.raises(UserError, match=says):
        packed_data.check_data(DataOptions(("a.jsonl",), **changes))
